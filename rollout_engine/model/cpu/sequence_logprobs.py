"""Scores of given sequences, by the trainer's own way through the engine's module (on the CPU).

rows padded on the right    7 3 9 4      one row        7 3 9 4 8 5      if the module shares prefixes: a beginning
                            7 3 8 5                                      that several sequences have is computed once
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rollout_engine.base.token_scores import TOKENS_ALONE, AskedScores, TokenScores
from rollout_engine.kernels.token_logprobs import row_stats
from rollout_engine.model.modules.packed_rows import sharing_prefixes
from rollout_engine.model.modules.shared_rows import SharedRows
from rollout_engine.model.ranks.pipe import PassedOn
from rollout_engine.model.sampling.logit_rows import LogitRows, row_pieces
from rollout_engine.model.sampling.module_logits import module_logits
from rollout_engine.model.sampling.scored_rows import ScoredRows, score_rows
from rollout_engine.model.sequences.beginnings import order_by_beginnings

_LOGIT_BYTES = 256 << 20
"""Bytes of logits that exist at a time, unless a single sequence needs more."""
_TOKENS = 512
"""Tokens computed at a time, unless a single sequence has more: as many as steps take of prompts while they decode."""
_GROUP_TOKENS = 4
"""Times as many are computed at a time, so that the samples of one prompt stay together."""

Around = Callable[[list[int], int, int], AbstractContextManager[object]]
"""Makes the context manager of a forward, given the indices of its sequences, their padded length, and its tokens."""


@torch.no_grad()
def sequence_logprobs(
    module: nn.Module,
    sequences: Sequence[list[int]],
    num_prompt: Sequence[int],
    *,
    temperature: float,
    vocab_size: int,
    asked: AskedScores = TOKENS_ALONE,
    around: Around = lambda *_: nullcontext(),
    shared: bool = False,
) -> Iterator[dict[int, TokenScores]]:
    """Yield, a batch at a time, the scores of every token after the prompt by the index of its sequence.

    `shared`: beginnings that sequences share are computed once, which `shares_prefixes` must have allowed. A stage that
    is not the last yields nothing of each batch.
    """
    budget = min(_LOGIT_BYTES // (4 * vocab_size), _TOKENS)
    batches = _shared_batches(sequences, num_prompt, budget) if shared else _padded_batches(sequences, budget)
    forward = _forward_shared if shared else _forward_padded
    for members in batches:
        rows = [sequences[i] for i in members]
        ids = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
        lengths, first = torch.tensor([*map(len, rows)]), torch.tensor([num_prompt[i] for i in members])
        columns = torch.arange(ids.shape[1])
        batch = _Batch(module, ids, columns < lengths[:, None], columns >= first[:, None], vocab_size)
        try:
            logits, places = forward(batch, partial(around, members, ids.shape[1]))
        except PassedOn:
            yield {}
            continue
        scored = _score(logits, places, batch.asked_ids, temperature, vocab_size, asked.of(members))
        sizes = (lengths - first).tolist()
        yield dict(zip(members, (part.on_host() for part in scored.divide(sizes)), strict=True))


class _Batch(NamedTuple):
    """Sequences of one forward."""

    module: nn.Module
    ids: Tensor
    """int64 [B, T], padded with 0 on the right."""
    real: Tensor
    """bool [B, T]: not padding."""
    behind_prompt: Tensor
    """bool [B, T]: not of the prompt."""
    vocab_size: int

    @property
    def asked(self) -> Tensor:
        """bool [B, T]: tokens to score."""
        return self.real & self.behind_prompt

    @property
    def asked_ids(self) -> Tensor:
        """int64 [M]: ids of the tokens to score, row by row."""
        return self.ids[self.asked]


_Enter = Callable[[int], AbstractContextManager[object]]
"""Makes the context manager of a forward of that many tokens."""


def _forward_padded(batch: _Batch, enter: _Enter) -> tuple[LogitRows, Tensor]:
    """Compute padded rows: their logits, and int64 [M], the row of logits for each token to score."""
    with enter(batch.ids.numel()):
        module: Any = batch.module
        logits = module(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.asked[:, 1:]]
    return LogitRows.of(logits), torch.arange(len(logits))


def _forward_shared(batch: _Batch, enter: _Enter) -> tuple[LogitRows, Tensor]:
    """Do as `_forward_padded`, with each shared beginning once, no padding, and logits of needed tokens alone."""
    rows = SharedRows.of(batch.ids, batch.real)
    behind = rows.sources[rows.places]  # the token before each next token, row by row
    behind = behind[batch.behind_prompt[:, 1 : rows.wanted.shape[1] + 1][rows.wanted]]
    distinct, places = behind.unique(return_inverse=True)
    module: Any = batch.module

    def forward(kept: Tensor) -> Any:
        inputs = dict(input_ids=rows.input_ids, position_ids=rows.position_ids)
        with enter(rows.input_ids.shape[1]), sharing_prefixes():
            return module(**inputs, use_cache=False, logits_to_keep=kept)

    return module_logits(module, forward, distinct, batch.vocab_size, may_repeat=True), places


def _score(
    logits: LogitRows, places: Tensor, token_ids: Tensor, temperature: float, vocab_size: int, asked: AskedScores
) -> ScoredRows:
    """Score token_ids int64 [M], and give the other scores asked for, a bounded number of rows of logits at a time."""
    candidate_ids = None
    if asked.candidate_ids is not None:
        candidate_ids = torch.from_numpy(np.concatenate(asked.candidate_ids).astype(np.int64))
    parts = []
    for piece in row_pieces(len(places), vocab_size, places.device):
        candidates = None if candidate_ids is None else candidate_ids[piece]
        taken = logits.take(places[piece])
        parts.append(score_rows(taken, token_ids[piece], temperature, row_stats, candidates, asked.num_top))
    return ScoredRows.join(parts)


def _padded_batches(sequences: Sequence[list[int]], budget: int) -> Iterator[list[int]]:
    """Indices of sequences, longest first, in batches of at most `budget` padded tokens (or one sequence)."""
    batch: list[int] = []
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        if batch and (len(batch) + 1) * len(sequences[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _shared_batches(sequences: Sequence[list[int]], num_prompt: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of sequences, those that begin alike together, in batches of at most `budget` different tokens.

    Samples of one prompt stay together up to `_GROUP_TOKENS` times as many.
    """
    batch: list[int] = []
    size = 0
    for i, num_common in order_by_beginnings(sequences):
        own = len(sequences[i]) - num_common
        room = budget * _GROUP_TOKENS if num_common >= num_prompt[i] else budget
        if batch and size + own > room:
            yield batch
            batch, size, own = [], 0, len(sequences[i])
        batch.append(i)
        size += own
    if batch:
        yield batch
