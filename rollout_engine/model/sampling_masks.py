"""Top-k, top-p and min-p, exactly, and the most likely tokens: without sorting the vocabulary where a few tokens do.

"Sorted" always means by logit, ties by token id. In that order each of the three rules keeps a prefix, so all that is
needed is the length of the shortest one. It comes from the largest logits, or from all of them where too many stay.
Only values are sorted, by NumPy (vector instructions); ids matter for ties alone.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build, sampling
from rollout_engine.kernels.token_logprobs import CHUNK, cumulative_mass, row_blocks

_CANDIDATES = 1024


class Truncation(NamedTuple):
    """Columns of n rows. Rules apply in this order, in float64."""

    temperature: Tensor
    """float64, > 0: every rule reads exp(logit / temperature)."""
    top_k: Tensor
    """int64: keep the k most likely tokens; 0 keeps all."""
    top_p: Tensor
    """float64: of these, the shortest sorted prefix whose share of their mass reaches it; 1 cuts none."""
    min_p: Tensor
    """float64: of these, tokens at least so many times as likely as the most likely one."""

    def rows(self, index: slice | Tensor) -> "Truncation":
        return Truncation(*(column[index] for column in self))


def cut_tail(logits: Tensor, truncation: Truncation) -> None:
    """Put -inf where a rule cuts, in place. `logits` is float32 [n, V] without NaN. The most likely token stays."""
    if build.library() is not None:
        return sampling.cut_tail(logits, *truncation)
    for block in row_blocks(logits):
        rules = truncation.rows(block)
        size = max(_CANDIDATES, int(rules.top_k.max()) + 1)
        mass = _total_mass(logits[block], rules.temperature) if ((rules.top_p < 1) & (rules.top_k == 0)).any() else None
        values = _largest(logits[block], size)
        lengths = _prefix_lengths(values, rules, mass)
        if size < logits.shape[1] and (lengths == size).any():
            values = _largest(logits[block], logits.shape[1])
            lengths = _prefix_lengths(values, rules, mass)
        _keep_prefix(logits[block], values, lengths)


def most_likely(logits: Tensor, k: int) -> Tensor:
    """Ids of the `k` <= V largest logits of each row, sorted: int64 [n, k]. `logits` [n, V] holds no NaN."""
    floor = logits.topk(k).values[:, -1:]
    rows, ids = (logits >= floor).nonzero(as_tuple=True)  # in order of row, then id: stable sorts keep ties by id
    order = logits[rows, ids].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    rows, ids = rows[order], ids[order]
    return ids[_rank_in_row(rows, len(logits)) < k].view(-1, k)


def _largest(logits: Tensor, size: int) -> Tensor:
    """The `size` largest values of each row, descending: float32 [n, size]; all of them where V is smaller."""
    values = logits.numpy()
    if size < values.shape[1]:
        values = np.partition(values, -size, axis=-1)[:, -size:]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def _total_mass(logits: Tensor, temperature: Tensor) -> Tensor:
    """Sum of exp((logit - max) / temperature): float64 [n]."""
    weights = (logits.double() - logits.amax(-1, keepdim=True)).div_(temperature[:, None]).exp_()
    padded = torch.nn.functional.pad(weights, (0, -logits.shape[1] % CHUNK))
    return cumulative_mass(padded.view(len(logits), -1, CHUNK))[:, -1]


def _prefix_lengths(values: Tensor, rules: Truncation, mass: Tensor | None) -> Tensor:
    """How many of the sorted `values` [n, M] stay, int64 [n]; M < V where M or more may.

    Every top_k is less than M or M is V; `mass` [n] is that of all tokens, for rows with top-p alone.
    """
    temperature, top_k, top_p, min_p = (column[:, None] for column in rules)
    weights = (values.double() - values[:, :1]).div_(temperature).exp_()
    keep = (torch.arange(values.shape[1]) < top_k) | (top_k == 0)
    reached = weights.cumsum(-1)
    target = reached.gather(-1, (top_k - 1).clamp(0, values.shape[1] - 1))
    if mass is not None:
        target = torch.where(top_k > 0, target, mass[:, None])
    keep[:, 1:] &= (reached[:, :-1] < top_p * target) | (top_p >= 1)  # not enough mass before this token
    keep &= weights >= min_p
    return keep.sum(-1).clamp(min=1)


def _keep_prefix(logits: Tensor, values: Tensor, lengths: Tensor) -> None:
    """-inf everywhere but in the first `lengths` tokens of each sorted row, whose largest logits are `values`."""
    floor = values.gather(-1, lengths[:, None] - 1)
    num_ties_kept = lengths - (values > floor).sum(-1)
    rows, ids = (logits == floor).nonzero(as_tuple=True)
    surplus = _rank_in_row(rows, len(logits)) >= num_ties_kept[rows]
    logits.masked_fill_(logits < floor, -torch.inf)
    logits[rows[surplus], ids[surplus]] = -torch.inf


def _rank_in_row(rows: Tensor, num_rows: int) -> Tensor:
    """0, 1, 2, ... within each run of equal row numbers; `rows` ascend."""
    counts = rows.bincount(minlength=num_rows)
    return torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
