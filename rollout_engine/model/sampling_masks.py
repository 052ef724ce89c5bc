"""Top-k, top-p and min-p, exactly, and the most likely tokens: without sorting the vocabulary.

"Sorted" always means by logit, ties by token id. In that order each of the three rules keeps a prefix, so all that is
needed is the length of the shortest one: it comes from the largest few logits, more of them where they do not suffice.
"""

import torch
from torch import Tensor

from rollout_engine.kernels.token_logprobs import CHUNK, cumulative_mass, row_blocks

_CANDIDATES = 256
_GROWTH = 16


def cut_tail(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """A copy of float32 `logits` [n, V] with -inf where a rule cuts. Rules in order, in float64, at `temperature`:

    * the `top_k` (int64 [n]) most likely tokens, 0 for all of them;
    * of these, the shortest sorted prefix whose share of their mass reaches `top_p` (float64 [n]), 1 for no cut;
    * of these, tokens at least `min_p` (float64 [n]) times as likely as the most likely one.

    The most likely token always stays.
    """
    kept = logits.clone()
    pending = torch.arange(len(logits))
    target = top_p * _total_mass(logits, temperature, needed=(top_p < 1) & (top_k == 0))
    size = max(_CANDIDATES, int(top_k.max()) + 1)
    while len(pending):
        size = min(size, logits.shape[1])
        values = logits[pending].topk(size).values
        settings = (column[pending, None] for column in (temperature, top_k, top_p, min_p, target))
        lengths = _prefix_lengths(values, *settings)
        enough = (lengths < size) | (size == logits.shape[1])
        kept[pending[enough]] = _keep_prefix(logits[pending[enough]], values[enough], lengths[enough])
        pending, size = pending[~enough], size * _GROWTH
    return kept


def most_likely(logits: Tensor, k: int) -> Tensor:
    """Ids of the `k` <= V largest logits of each row, sorted: int64 [n, k]. No NaN."""
    floor = logits.topk(k).values[:, -1:]
    rows, ids = (logits >= floor).nonzero(as_tuple=True)  # in order of row, then id: stable sorts keep ties by id
    order = logits[rows, ids].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    rows, ids = rows[order], ids[order]
    return ids[_rank_in_row(rows, len(logits)) < k].view(-1, k)


def _total_mass(logits: Tensor, temperature: Tensor, needed: Tensor) -> Tensor:
    """Sum of exp((logit - max) / temperature), float64 [n]; 0 in rows where it is not `needed`."""
    total = torch.zeros_like(temperature)
    rows = needed.nonzero()[:, 0]
    for block in row_blocks(logits[rows]):
        chosen = logits[rows[block]].double()
        weights = (chosen - chosen.amax(-1, keepdim=True)).div_(temperature[rows[block], None]).exp_()
        padded = torch.nn.functional.pad(weights, (0, -logits.shape[1] % CHUNK))
        total[rows[block]] = cumulative_mass(padded.view(len(chosen), -1, CHUNK))[:, -1]
    return total


def _prefix_lengths(
    values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, target: Tensor
) -> Tensor:
    """How many of the sorted `values` [n, M] stay, int64 [n]; M where more than M may stay. Settings are [n, 1].

    M > `top_k`, and `target` is the mass that top-p must reach in rows without top-k.
    """
    weights = (values.double() - values[:, :1]).div_(temperature).exp_()
    ranks = torch.arange(values.shape[1])
    keep = (top_k == 0) | (ranks < top_k)
    mass = weights.cumsum(-1)
    within_top_k = mass.gather(-1, (top_k - 1).clamp(0, values.shape[1] - 1))
    target = torch.where(top_k > 0, top_p * within_top_k, target)
    reached = torch.zeros_like(keep)
    reached[:, 1:] = mass[:, :-1] >= target  # by the tokens before
    keep &= ~reached | (top_p >= 1)
    keep &= weights >= min_p
    return keep.sum(-1).clamp(min=1)


def _keep_prefix(logits: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """-inf everywhere but in the first `lengths` tokens of each sorted row, whose largest logits are `values`."""
    floor = values.gather(-1, lengths[:, None] - 1)
    num_ties_kept = lengths - (values > floor).sum(-1)
    kept = logits.masked_fill(logits < floor, -torch.inf)
    rows, ids = (logits == floor).nonzero(as_tuple=True)
    surplus = _rank_in_row(rows, len(logits)) >= num_ties_kept[rows]
    kept[rows[surplus], ids[surplus]] = -torch.inf
    return kept


def _rank_in_row(rows: Tensor, num_rows: int) -> Tensor:
    """0, 1, 2, ... within each run of equal row numbers; `rows` ascend."""
    counts = rows.bincount(minlength=num_rows)
    return torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
