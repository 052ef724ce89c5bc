"""Scores of given sequences, by the kernels of steps (on a device). KV and states are in a pool of its own.

Sequences are computed one after another, those that begin alike together: the KV of a beginning that a sequence shares
with the one before it is in the pool already, and is not computed again. A state is that of one position alone: layers
that keep some compute all tokens.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.token_scores import TOKENS_ALONE, AskedScores, TokenScores
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.triton import sampling
from rollout_engine.kernels.triton.paged_attention import Batch
from rollout_engine.model.cuda.attention import CudaBatch, CudaKVPool
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.sampling.scored_rows import score_rows
from rollout_engine.model.sequences.beginnings import order_by_beginnings

_TOKENS = 512
"""Tokens computed at a time."""


@torch.inference_mode()
def sequence_logprobs(
    model: CudaModel,
    sequences: Sequence[list[int]],
    num_prompt: Sequence[int],
    temperature: float,
    adapter_slot: int = -1,
    routed_experts: Sequence[np.ndarray] | None = None,
    asked: AskedScores = TOKENS_ALONE,
) -> Iterator[dict[int, TokenScores]]:
    """Yield, some tokens at a time, the scores of tokens after the prompt by the index of their sequence.

    `adapter_slot`: of the adapter that all rows have; -1: none. `routed_experts`: of each sequence int16
    [len - 1, L, k], experts that its tokens are sent to; -1: by their routers' choice.
    """
    longest = max(map(len, sequences), default=0)
    num_slots = 0 if model.kv.states.is_empty else 1
    pool = model.make_pool(num_blocks=-(-longest // model.kv.block_size), num_state_slots=num_slots)
    score = partial(_score_sequence, model, pool, temperature, adapter_slot)
    num_held = 0
    for i, num_common in order_by_beginnings(sequences):
        experts = None if routed_experts is None else routed_experts[i]
        reuses = experts is None and not num_slots
        known = min(num_common, num_held, num_prompt[i] - 1) if reuses else 0
        num_held = len(sequences[i]) - 1  # no KV is computed of a sequence's last token
        yield {i: (yield from score(sequences[i], known, num_prompt[i], experts, asked.of([i])))}


def _score_sequence(
    model: CudaModel,
    pool: CudaKVPool,
    temperature: float,
    adapter_slot: int,
    tokens: list[int],
    num_known: int,
    num_prompt: int,
    routed_experts: np.ndarray | None,
    asked: AskedScores,
) -> Generator[dict[int, TokenScores], None, TokenScores]:
    """Compute one sequence behind its first `num_known` tokens, whose KV is there; yield nothing new between pieces."""
    ids = torch.tensor(tokens, device=model.device)
    routed = None if routed_experts is None else torch.tensor(routed_experts, dtype=torch.int32, device=model.device)
    candidate_ids = None
    if asked.candidate_ids is not None:
        candidate_ids = torch.from_numpy(asked.candidate_ids[0].astype(np.int64)).to(model.device)
    found: list[TokenScores] = []
    step, width = min(_TOKENS, model.limits.num_tokens), -(-model.limits.context // pool.block_size)
    for start in range(num_known, len(tokens) - 1, step):
        end = min(start + step, len(tokens) - 1)
        wanted = max(start, num_prompt - 1)
        rows = torch.arange(wanted - start, max(end - start, wanted - start), device=model.device)
        batch = _chunk(ids, start, end, pool, width)
        if adapter_slot >= 0:
            assert model.adapters is not None, "an adapter was found there"
            batch = batch._replace(adapters=model.adapters.whole_batch(adapter_slot, end - start))
        if routed is not None:
            batch = batch._replace(routed=routed[start:end])
        logits = model.forward(batch, rows if len(rows) else rows.new_zeros(1), pool)
        if len(rows):
            first = wanted + 1 - num_prompt
            candidates = None if candidate_ids is None else candidate_ids[first : first + len(rows)]
            targets = ids[wanted + 1 : end + 1]
            found.append(score_rows(logits, targets, temperature, sampling.score, candidates, asked.num_top).on_host())
        if end < len(tokens) - 1:
            yield {}
    return TokenScores.join(found)


def _chunk(ids: Tensor, start: int, end: int, pool: CudaKVPool, width: int) -> CudaBatch:
    """The batch of tokens [start, end). Block tables of steps have `width` entries: so kernels for them serve here."""
    positions = torch.arange(start, end, device=ids.device)
    table = torch.arange(max(pool.num_blocks, width), dtype=torch.int32, device=ids.device)
    bounds = torch.tensor([0, end - start], dtype=torch.int32, device=ids.device)
    lens = torch.tensor([end], dtype=torch.int32, device=ids.device)
    attention = Batch(bounds, lens, table[None], num_decodes=int(end - start == 1))
    states = None if pool.states.is_empty else StateChunks.in_place([end - start], [start], [0])
    return CudaBatch(ids[start:end], positions, positions, attention, states=states)
