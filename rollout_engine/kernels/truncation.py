"""Exact top-k, top-p and min-p, and the most likely tokens, without sorting the whole vocabulary if possible.

"Sorted" always means by logit, ties by token id. In that order each of the three rules keeps a prefix, so the result is
the end of the shortest prefix: its *edges* (floor, last tie), see `KeptTokens`. The C++ kernel (`cpu/truncation.h`)
finds them within the draw; its eager twin here sorts the largest logits with NumPy, or all if too many are kept.
"""

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build, sampling
from rollout_engine.kernels.row_stats import CHUNK, TokenSets, Truncation
from rollout_engine.kernels.token_logprobs import cumulative_mass, row_blocks

_CANDIDATES = 1024


def edges_of(logits: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Edges (floor float32 [n], last tie int64 [n]) of `logits` float32 [n, V] without NaN; they keep a token."""
    floor, last_tie = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    for block in row_blocks(logits):
        rules = truncation.rows(block)
        size = max(_CANDIDATES, int(rules.top_k.max()) + 1)
        mass = _total_mass(logits[block], rules.temperature) if ((rules.top_p < 1) & (rules.top_k == 0)).any() else None
        values = _largest(logits[block], size)
        lengths = _prefix_lengths(values, rules, mass)
        if size < logits.shape[1] and (lengths == size).any():
            values = _largest(logits[block], logits.shape[1])
            lengths = _prefix_lengths(values, rules, mass)
        floor[block], last_tie[block] = _edges(logits[block], values, lengths)
    return floor, last_tie


def is_kept(logits: Tensor, token_ids: Tensor, floor: Tensor, last_tie: Tensor) -> Tensor:
    """Whether the edges [n] keep each of `token_ids`, given their `logits`, both [n, k] -> bool [n, k]."""
    floor, last_tie = floor[:, None], last_tie[:, None]
    return (logits > floor) | ((logits == floor) & (token_ids <= last_tie))


def kept_ids(logits: Tensor, rows: Tensor, floor: Tensor, last_tie: Tensor) -> TokenSets:
    """Tokens that edges [n] keep of these `rows`, int64 [n], of `logits` [N, V], all of them if all are kept.

    A token of logit -inf, which no draw finds, is in no set.
    """
    if build.load_kernels() is not None:
        return sampling.kept_ids(logits, rows, floor, last_tie)
    some = logits[rows].float()
    is_in = is_kept(some, torch.arange(some.shape[1]).expand_as(some), floor, last_tie) & (some > -torch.inf)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), is_in.sum(1).cumsum(0)])
    return TokenSets(starts, is_in.nonzero()[:, 1].int())


def most_likely(logits: Tensor, k: int) -> Tensor:
    """Ids of the `k` <= V largest logits of each row, sorted: int64 [n, k]. `logits` [n, V] holds no NaN."""
    if not logits.is_cpu:  # the shorter way waits until a device returns the number of tokens
        return logits.sort(descending=True, stable=True).indices[:, :k]
    floor = logits.topk(k).values[:, -1:]
    rows, ids = (logits >= floor).nonzero(as_tuple=True)  # by row, then id: stable sorts keep ties by id
    order = logits[rows, ids].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    rows, ids = rows[order], ids[order]
    return ids[_rank_in_row(rows, len(logits)) < k].view(-1, k)


def _largest(logits: Tensor, size: int) -> Tensor:
    """The `size` largest values of each row, descending: float32 [n, min(size, V)]."""
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
    """How many of the sorted `values` [n, M] are kept, int64 [n]; a result of M < V means M or more.

    Every top_k is less than M, or M is V. `mass` [n] is the total weight of all tokens, for rows with top-p alone.
    """
    temperature, top_k, top_p, min_p = (column[:, None] for column in rules)
    weights = (values.double() - values[:, :1]).div_(temperature).exp_()
    keep = (torch.arange(values.shape[1]) < top_k) | (top_k == 0)
    reached = weights.cumsum(-1)
    target = reached.gather(-1, (top_k - 1).clamp(0, values.shape[1] - 1))
    if mass is not None:
        target = torch.where(top_k > 0, target, mass[:, None])
    keep[:, 1:] &= (reached[:, :-1] < top_p * target) | (top_p >= 1)  # the tokens before it have too little mass
    keep &= weights >= min_p
    return keep.sum(-1).clamp(min=1)


def _edges(logits: Tensor, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Edges that keep the first `lengths` tokens of each sorted row, whose largest logits are `values`."""
    floor = values.gather(-1, lengths[:, None] - 1)
    num_ties_kept = lengths - (values > floor).sum(-1)
    rows, ids = (logits == floor).nonzero(as_tuple=True)
    last = _rank_in_row(rows, len(logits)) == num_ties_kept[rows] - 1
    return floor[:, 0], torch.empty_like(lengths).index_copy_(0, rows[last], ids[last])


def _rank_in_row(rows: Tensor, num_rows: int) -> Tensor:
    """0, 1, 2, ... within each run of equal row numbers; `rows` ascend."""
    counts = rows.bincount(minlength=num_rows)
    return torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
