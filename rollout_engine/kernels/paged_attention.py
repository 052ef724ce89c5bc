"""Attention over KV tiles of fixed size: a query token gets the same bits however it is batched, chunked or cached.

This is the eager twin of `kernels.cpu.attention`, used if that cannot be compiled.

Context is read in tiles of `KV_TILE` tokens counted from position 0; each tile updates a running maximum, sum and
output in float32 (online softmax: Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). A tile in which a row
sees no key leaves that row's state unchanged bit for bit, so sequences of different lengths share one call, and
decode, prefill and the trainer's dense forward agree.

Shapes: a *row* is one (query token, query head); the `group` query heads of one KV head are adjacent, so that a KV head
is read once. `N` sequences, `Hk` KV heads, `R` rows of one KV head in one sequence.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.linear import NotInvariant

KV_TILE = 64
ROW_TILE = 8
"""Products have multiples of this many rows: libraries use other kernels for fewer (`prove_row_invariance`)."""

_CACHED_MASK_ELEMENTS = 1 << 22
_LOWEST = torch.finfo(torch.float32).min


Tile = Callable[[int, int], tuple[Tensor, Tensor]]
"""(tile, num_sequences) -> K [num_sequences * Hk, KV_TILE, Dk], V [..., Dv], float32; V finite everywhere."""


class TilePlan:
    """Sequences and rows that read each KV tile, and their masks; shared by all layers.

    positions int64 [N, R]: each row's position, ascending, -1 for padding. The longest sequence is first.
    reach int64 [N, R]: how many positions behind its own each row sees, as `Reach`; None: none.
    """

    def __init__(self, positions: Tensor, group: int, reach: Tensor | None = None) -> None:
        self.positions = positions
        self._last_seen = positions if reach is None else positions + reach
        """int64 [N, R]: position of the last key that each row sees."""
        real = positions >= 0
        first = positions.masked_fill(~real, 1 << 60).amin(1).tolist()
        last = positions.amax(1).tolist()
        self.steps: list[tuple[int, int]] = []
        """Per tile: number of sequences that reach it, and the first row that does (a multiple of `ROW_TILE`)."""
        count = len(last)
        for start in range(0, last[0] + 1, KV_TILE):
            while last[count - 1] < start:
                count -= 1
            if reach is None:
                skipped = max(0, start - max(first[:count])) * group
            else:
                skipped = int(((self._last_seen[:count] < start) & real[:count]).sum(1).min())
            self.steps.append((count, skipped - skipped % ROW_TILE))
        self._hidden: dict[tuple[int, int], Tensor | None] = {}

    def hidden(self, j: int, sliding_window: int) -> Tensor | None:
        """bool [n, 1, rows, KV_TILE]: keys of tile `j` masked from each row; None if all rows see all keys."""
        key = (j, sliding_window)
        if key in self._hidden:
            return self._hidden[key]
        count, first_row = self.steps[j]
        positions = self.positions[:count, first_row:]
        keys = torch.arange(j * KV_TILE, (j + 1) * KV_TILE, device=positions.device)
        hidden = keys > self._last_seen[:count, first_row:].unsqueeze(-1)
        if sliding_window:
            hidden |= positions.unsqueeze(-1) - keys >= sliding_window
        needed = bool((hidden.any(-1) & (positions >= 0)).any())
        result = hidden.unsqueeze(1) if needed else None
        if not needed or hidden.numel() <= _CACHED_MASK_ELEMENTS:
            self._hidden[key] = result
        return result


def attend(
    query: Tensor, num_kv_heads: int, tile: Tile, plan: TilePlan, params: AttentionParams, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """query float32 [N * Hk, R, Dk] -> output float32 [N * Hk, R, Dv], log-sum-exp [N * Hk, R]; padding rows arbitrary.

    R is a multiple of `ROW_TILE`. `sinks` [H] act as a first key with these scores and a value of zeros.
    """
    query = query * params.scale
    top = query.new_full((*query.shape[:2], 1), _LOWEST)
    total = torch.zeros_like(top)
    if sinks is not None:
        top, total = _rows_of_heads(sinks, num_kv_heads, query.shape), torch.ones_like(top)
    out: Tensor | None = None
    for j, (num_sequences, first_row) in enumerate(plan.steps):
        keys, values = tile(j, num_sequences)
        if out is None:
            out = query.new_zeros(*query.shape[:2], values.shape[-1])
        active = (slice(num_sequences * num_kv_heads), slice(first_row, None))
        scores = scores_of(query[active], keys, plan, j, num_kv_heads, params)
        old_top = top[active]
        new_top = torch.maximum(old_top, scores.amax(-1, keepdim=True))
        rescale = torch.sub(old_top, new_top).exp_()
        weights = scores.sub_(new_top).exp_()
        total[active] = total[active] * rescale + weights.sum(-1, keepdim=True)
        out[active] = out[active] * rescale + torch.bmm(weights, values)
        top[active] = new_top
    assert out is not None, "attention over no tiles"
    total.masked_fill_(total == 0, 1.0)  # padding rows saw nothing
    return out / total, (top + total.log()).squeeze(-1)


def _rows_of_heads(values: Tensor, num_kv_heads: int, shape: torch.Size) -> Tensor:
    """values [H] -> float32 [N * Hk, R, 1], the value of each row's head; `shape` is [N * Hk, R, ...]."""
    by_group = values.float().view(num_kv_heads, -1)
    rows = by_group[:, torch.arange(shape[1]) % by_group.shape[1]]
    return rows.repeat(shape[0] // num_kv_heads, 1).unsqueeze(-1)


def scores_of(
    query: Tensor, keys: Tensor, plan: TilePlan, j: int, num_kv_heads: int, params: AttentionParams
) -> Tensor:
    """Scores of scaled queries and the first L keys [n * Hk, L, Dk] of a tile: [n * Hk, rows, L], -inf if masked."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    if params.softcap:
        scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
    hidden = plan.hidden(j, params.sliding_window)
    if hidden is not None:
        hidden = hidden[..., : keys.shape[1]]
        scores.view(-1, num_kv_heads, *scores.shape[1:]).masked_fill_(hidden, float("-inf"))
    return scores


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of `ROW_TILE`."""
    return -(-rows // ROW_TILE) * ROW_TILE


def prove_row_invariance(head_dims: set[int], dtype: torch.dtype) -> None:
    """Check, once at start-up, that batched products with these head sizes are row-invariant on this machine.

    Raises `NotInvariant` if they are not. The C++ kernel needs no check: it computes each row separately.
    """
    if compiled.supports(dtype):
        return
    for dim in head_dims:
        if not _rows_are_independent(dim):
            raise NotInvariant(
                f"float32 batched products with head size {dim} depend on the number of rows on this CPU, even in "
                f"multiples of {ROW_TILE}"
            )


@cache
def _rows_are_independent(dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(8, 256, dim, generator=generator)
    keys = torch.randn(8, KV_TILE, dim, generator=generator)
    weights = torch.rand(8, 256, KV_TILE, generator=generator)
    threads = torch.get_num_threads()
    scores, mixed = torch.bmm(query, keys.transpose(1, 2)), torch.bmm(weights, keys)
    try:
        for count in sorted({1, 2, threads}):
            torch.set_num_threads(count)
            for batch in (1, 3, 8):
                for start, rows in ((0, 8), (8, 8), (16, 24), (40, 64), (8, 248), (0, 128)):
                    part = (slice(batch), slice(start, start + rows))
                    if not torch.equal(torch.bmm(query[part], keys[:batch].transpose(1, 2)), scores[part]):
                        return False
                    if not torch.equal(torch.bmm(weights[part], keys[:batch]), mixed[part]):
                        return False
    finally:
        torch.set_num_threads(threads)
    return True
