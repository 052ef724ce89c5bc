"""Results of sampling and scoring for each row of logits, and truncation rules, on the CPU and on devices."""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 128
"""Tokens whose weights are summed together in float32."""


class RowStats(NamedTuple):
    """Normalisation of N rows of logits, and one token of each with its log-prob."""

    maximum: Tensor
    """float32 [N]; NaN for a row that holds NaN or +inf, or nothing but -inf."""
    log_total: Tensor
    """float64 [N]: log of the row's total weight."""
    tokens: Tensor
    """int64 [N]."""
    logprobs: Tensor
    """float32 [N]: log-probs of `tokens`."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str) -> "RowStats":
        """Uninitialised memory for `num_rows` rows."""
        dtypes = torch.float32, torch.float64, torch.int64, torch.float32
        return cls(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))


class UniformsOf(NamedTuple):
    """Uniform numbers of N rows, by the seeds and positions that they depend on; see `kernels.rng`."""

    seeds: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]."""


class Truncation(NamedTuple):
    """Truncation rules of N rows. They apply in this order, in float64, to tokens sorted by (logit, then id).

    The rules are `base.sampling_params.TRUNCATION_RULES`, each in the units of its sampling parameter.
    """

    temperature: Tensor
    """float64, > 0: every rule reads exp(logit / temperature)."""
    top_k: Tensor
    """int64, >= 0: keep the k most likely tokens; 0 keeps all."""
    top_p: Tensor
    """float64: of these, the shortest sorted prefix whose share of their mass reaches it; 1 cuts none."""
    min_p: Tensor
    """float64: of these, tokens at least this fraction as likely as the most likely one."""

    def rows(self, index: slice | Tensor) -> "Truncation":
        """The rules of some of the rows."""
        return Truncation(*(column[index] for column in self))


class TokenMasks(NamedTuple):
    """Masks of some of N rows: tokens that are not allowed cannot be drawn."""

    bits: Tensor
    """int32 [M, W], W * 32 >= V: token t is allowed if bit t % 32 of word t // 32 is set."""
    places: Tensor
    """int64 [N]: index into `bits`; -1 for a row without a mask."""


class TokenSets(NamedTuple):
    """Sets of tokens of N rows, end to end. A row without tokens stands for all of the vocabulary."""

    starts: Tensor
    """int64 [N + 1]: row i has `ids[starts[i]:starts[i + 1]]`."""
    ids: Tensor
    """int32, ascending in each row."""


class KeptTokens(NamedTuple):
    """Tokens of N rows that can be drawn: those above `floor`, and those equal to it with ids up to `last_tie`.

    In a row with a mask only those of them that it allows.
    """

    log_total: Tensor
    """float64 [N]: log of the kept tokens' weight, under the whole row's maximum; not finite if none is kept."""
    floor: Tensor
    """float32 [N]."""
    last_tie: Tensor
    """int64 [N]."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str | None = None) -> "KeptTokens":
        """Uninitialised memory for `num_rows` rows."""
        dtypes = torch.float64, torch.float32, torch.int64
        return cls(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))
