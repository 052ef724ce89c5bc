"""Scores of rows of logits: log-probs of one token, of given candidates and of the most likely tokens of each row.

All are parts of one log-softmax over the row, with the bits of `token_logprobs`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.token_scores import TokenScores
from rollout_engine.kernels.row_stats import RowStats
from rollout_engine.kernels.token_logprobs import RowStatsKernel, logprobs_at, row_blocks, row_temperatures
from rollout_engine.kernels.truncation import most_likely

_DEVICE_BLOCK_NUMEL = 1 << 22
"""Logits that are sorted at a time on a device: ids of 64 bits for each of them may be held there."""


class ScoredRows(NamedTuple):
    """Scores of M rows."""

    logprobs: Tensor
    """float32 [M]."""
    candidates: Tensor | None
    """float32 [M, K]."""
    top_ids: Tensor | None
    """int64 [M, k]."""
    top_logprobs: Tensor | None
    """float32 [M, k]."""

    @classmethod
    def join(cls, parts: list["ScoredRows"]) -> "ScoredRows":
        """The rows of all parts, end to end."""
        joined: list[Any] = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
        return cls(*joined)

    def on_host(self) -> TokenScores:
        """The same as arrays of their own in the host's memory."""
        logprobs, candidates, top_ids, top_logprobs = (None if each is None else each.cpu().numpy() for each in self)
        assert logprobs is not None
        return TokenScores(
            logprobs.copy(),
            None if candidates is None else candidates.copy(),
            None if top_ids is None else top_ids.astype(np.int32),
            None if top_logprobs is None else top_logprobs.copy(),
        )

    def divide(self, sizes: Sequence[int]) -> Iterator["ScoredRows"]:
        """Yield the rows of parts with these numbers of rows."""
        ends = accumulate(sizes)
        for size, end in zip(sizes, ends, strict=True):
            part: list[Any] = [None if column is None else column[end - size : end] for column in self]
            yield ScoredRows(*part)


def score_rows(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    kernel: RowStatsKernel,
    candidate_ids: Tensor | None = None,
    num_top: int = 0,
) -> ScoredRows:
    """Score logits [M, V]: of token_ids int64 [M], of candidate_ids int64 [M, K], and of the `num_top` most likely."""
    temperatures = row_temperatures(temperature, logits)
    stats = kernel(logits, temperatures, token_ids)
    candidates = None if candidate_ids is None else _logprobs_of(logits, candidate_ids, temperatures, stats)
    if not num_top:
        return ScoredRows(stats.logprobs, candidates, None, None)
    blocks = list(row_blocks(logits, _DEVICE_BLOCK_NUMEL))
    found = [most_likely(torch.nan_to_num(logits[block]), num_top) for block in blocks]
    top = torch.cat(found) if found else token_ids.new_empty(0, num_top)
    return ScoredRows(stats.logprobs, candidates, top, _logprobs_of(logits, top, temperatures, stats))


def _logprobs_of(logits: Tensor, ids: Tensor, temperatures: Tensor, stats: RowStats) -> Tensor:
    """float32 [M, n]: log-probs of `ids` int64 [M, n], given the statistics of their rows."""
    return logprobs_at(logits.gather(-1, ids), stats.maximum[:, None], temperatures[:, None], stats.log_total[:, None])
