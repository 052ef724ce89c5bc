"""Log-probs of given sequences, by the kernels of steps (on a device). KV and states are in a pool of its own."""

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.token_logprobs import row_temperatures
from rollout_engine.kernels.triton import sampling
from rollout_engine.kernels.triton.paged_attention import Batch
from rollout_engine.model.cuda.attention import CudaBatch, CudaKVPool
from rollout_engine.model.cuda.model import CudaModel

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
) -> Iterator[dict[int, np.ndarray]]:
    """Yield, some tokens at a time, the log-probs of tokens after the prompt: index -> float32 [len - num_prompt].

    `adapter_slot`: of the adapter that all rows have; -1: none. `routed_experts`: of each sequence int16
    [len - 1, L, k], experts that its tokens are sent to; -1: by their routers' choice.
    """
    longest = max(map(len, sequences), default=0)
    num_slots = 0 if model.kv.states.is_empty else 1
    pool = model.make_pool(num_blocks=-(-longest // model.kv.block_size), num_state_slots=num_slots)
    for i, (tokens, first) in enumerate(zip(sequences, num_prompt, strict=True)):
        experts = None if routed_experts is None else routed_experts[i]
        yield {i: (yield from _score_sequence(model, pool, tokens, first, temperature, adapter_slot, experts))}


def _score_sequence(
    model: CudaModel,
    pool: CudaKVPool,
    tokens: list[int],
    num_prompt: int,
    temperature: float,
    adapter_slot: int,
    routed_experts: np.ndarray | None,
) -> Generator[dict[int, np.ndarray], None, np.ndarray]:
    """Compute one sequence; yield nothing new between two pieces of it."""
    ids = torch.tensor(tokens, device=model.device)
    routed = None if routed_experts is None else torch.tensor(routed_experts, dtype=torch.int32, device=model.device)
    found = [np.empty(0, np.float32)]
    step, width = min(_TOKENS, model.limits.num_tokens), -(-model.limits.context // pool.block_size)
    for start in range(0, len(tokens) - 1, step):
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
            temperatures = row_temperatures(temperature, logits)
            stats = sampling.score(logits, temperatures, ids[wanted + 1 : end + 1])
            found.append(stats.logprobs.cpu().numpy())
        if end < len(tokens) - 1:
            yield {}
    return np.concatenate(found)


def _chunk(ids: Tensor, start: int, end: int, pool: CudaKVPool, width: int) -> CudaBatch:
    """The batch of tokens [start, end). Block tables of steps have `width` entries: so kernels for them serve here."""
    positions = torch.arange(start, end, device=ids.device)
    table = torch.arange(max(pool.num_blocks, width), dtype=torch.int32, device=ids.device)
    bounds = torch.tensor([0, end - start], dtype=torch.int32, device=ids.device)
    lens = torch.tensor([end], dtype=torch.int32, device=ids.device)
    attention = Batch(bounds, lens, table[None], num_decodes=int(end - start == 1))
    states = None if pool.states.is_empty else StateChunks.in_place([end - start], [start], [0])
    return CudaBatch(ids[start:end], positions, positions, attention, states=states)
