"""Attention over KV tiles of fixed size: the same bits for a query token however it was batched, chunked or cached.

Context is read in tiles of `KV_TILE` tokens counted from position 0; each tile updates a running maximum, sum and
output in float32 (online softmax: Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). A tile in which a row
sees nothing leaves that row's state untouched bit for bit, so sequences of different lengths share one call, and
decode, prefill and the trainer's dense forward agree.

Shapes: a *row* is one (query token, query head); the `group` query heads of one KV head lie next to one another, so
that a KV head is read once. `N` sequences, `Hk` KV heads, `R` rows of one KV head in one sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.linear import NotInvariant

KV_TILE = 64
ROW_TILE = 8
"""Rows of one product come in multiples of this: below it a GEMM library picks other kernels (`prove_row_invariance`)."""

_LOWEST = torch.finfo(torch.float32).min


class Scoring(NamedTuple):
    """How scores become weights."""

    scale: float
    sliding_window: int = 0
    """A query at position p sees keys at positions above p - sliding_window; 0 sees all before it."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 leaves them."""


Tile = Callable[[int, int], tuple[Tensor, Tensor]]
"""(tile, num_sequences) -> K [num_sequences * Hk, KV_TILE, Dk], V [..., Dv], float32, finite wherever no query may look."""


def attend(
    query: Tensor, positions: Tensor, num_kv_heads: int, tile: Tile, tiles: "TilePlan", scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """query float32 [N * Hk, R, Dk], positions int64 [N, R] (-1: padding) -> output float32 [N * Hk, R, Dv], lse [N * Hk, R].

    R is a multiple of `ROW_TILE`; sequences come longest context first (`TilePlan`).
    """
    query = query * scoring.scale
    top = query.new_full((*query.shape[:2], 1), _LOWEST)
    total = torch.zeros_like(top)
    out: Tensor | None = None
    for j, (num_sequences, first_row) in enumerate(tiles):
        keys, values = tile(j, num_sequences)
        if out is None:
            out = query.new_zeros(*query.shape[:2], values.shape[-1])
        active = (slice(num_sequences * num_kv_heads), slice(first_row, None))
        scores = _scores(query[active], keys, positions[:num_sequences, first_row:], num_kv_heads, j, scoring)
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


class TilePlan(list[tuple[int, int]]):
    """For each KV tile: (sequences that reach it, first row that sees it). Sequences sorted longest context first."""

    @classmethod
    def of(cls, first_positions: list[int], last_positions: list[int], group: int) -> "TilePlan":
        """Per sequence the positions of its first and last query; the last also bounds its context."""
        plan = cls()
        num_sequences = len(last_positions)
        for start in range(0, last_positions[0] + 1, KV_TILE):
            while last_positions[num_sequences - 1] < start:
                num_sequences -= 1
            skipped = max(0, min(start - first for first in first_positions[:num_sequences])) * group
            plan.append((num_sequences, skipped - skipped % ROW_TILE))
        return plan


def _scores(query: Tensor, keys: Tensor, positions: Tensor, num_kv_heads: int, j: int, scoring: Scoring) -> Tensor:
    """Scaled scores [n * Hk, R, KV_TILE], -inf where the row may not look."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    if scoring.softcap:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    hidden = hidden_keys(positions, j, scoring.sliding_window)  # [n, R, KV_TILE]
    by_sequence = scores.view(-1, num_kv_heads, *scores.shape[1:])
    by_sequence.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    return scores


def hidden_keys(positions: Tensor, j: int, sliding_window: int) -> Tensor:
    """bool [..., KV_TILE]: keys of tile `j` that a query at `positions` [...] may not see."""
    keys = torch.arange(j * KV_TILE, (j + 1) * KV_TILE, device=positions.device)
    distance = positions.unsqueeze(-1) - keys
    hidden = distance < 0
    return hidden | (distance >= sliding_window) if sliding_window else hidden


class DenseAttention(torch.autograd.Function):
    """The trainer's side: q [B, H, T, Dk], k [B, Hk, T, Dk], v [B, Hk, T, Dv] at positions 0..T-1 -> [B, T, H, Dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        batch, num_heads, length, _ = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        query, keys, values = _to_rows(q, num_kv_heads), _to_tiles(k), _to_tiles(v)
        positions = _row_positions(batch, length, group, query.shape[1], q.device)
        plan = TilePlan.of([0] * batch, [length - 1] * batch, group)
        out, lse = attend(query, positions, num_kv_heads, lambda j, n: (keys[:, j], values[:, j]), plan, scoring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scoring = scoring
        return _from_rows(out, batch, num_heads, length).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """FlashAttention's: weights recomputed a tile at a time from the saved log-sum-exp."""
        q, k, v, out, lse = ctx.saved_tensors
        scoring: Scoring = ctx.scoring
        batch, num_heads, length, _ = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        query, keys, values = _to_rows(q, num_kv_heads), _to_tiles(k), _to_tiles(v)
        grad_out = _to_rows(grad.transpose(1, 2), num_kv_heads)
        positions = _row_positions(batch, length, group, query.shape[1], q.device)
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for j, (_, first) in enumerate(TilePlan.of([0] * batch, [length - 1] * batch, group)):
            rows = slice(first, None)
            scores = _scores(query[:, rows] * scoring.scale, keys[:, j], positions[:, rows], num_kv_heads, j, scoring)
            weights = (scores - lse[:, rows, None]).exp()
            weights.view(batch, num_kv_heads, *weights.shape[1:]).masked_fill_((positions[:, None, rows, None] < 0), 0.0)
            grad_scores = weights * (torch.bmm(grad_out[:, rows], values[:, j].transpose(1, 2)) - delta[:, rows])
            if scoring.softcap:
                grad_scores *= (1 - (scores / scoring.softcap) ** 2).nan_to_num_(0.0, 0.0, 0.0)
            grad_q[:, rows] += torch.bmm(grad_scores, keys[:, j]) * scoring.scale
            grad_k[:, j] = torch.bmm(grad_scores.transpose(1, 2), query[:, rows]) * scoring.scale
            grad_v[:, j] = torch.bmm(weights.transpose(1, 2), grad_out[:, rows])
        return (
            _from_rows(grad_q, batch, num_heads, length).transpose(1, 2).to(q.dtype),
            _from_tiles(grad_k, k),
            _from_tiles(grad_v, v),
            None,
        )


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of `ROW_TILE`."""
    return -(-rows // ROW_TILE) * ROW_TILE


def _to_rows(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> float32 [B * Hk, R, D], rows (token, head of the group), zero rows at the end."""
    batch, num_heads, length, dim = q.shape
    group = num_heads // num_kv_heads
    rows = q.new_zeros(batch, num_kv_heads, padded_rows(length * group), dim, dtype=torch.float32)
    by_token = rows[:, :, : length * group].view(batch, num_kv_heads, length, group, dim)
    by_token.copy_(q.view(batch, num_kv_heads, group, length, dim).transpose(2, 3))
    return rows.view(batch * num_kv_heads, -1, dim)


def _from_rows(rows: Tensor, batch: int, num_heads: int, length: int) -> Tensor:
    """[B * Hk, R, D] -> [B, T, H, D]."""
    num_kv_heads = len(rows) // batch
    group = num_heads // num_kv_heads
    by_token = rows[:, : length * group].reshape(batch, num_kv_heads, length, group, -1)
    return by_token.permute(0, 2, 1, 3, 4).reshape(batch, length, num_heads, -1)


def _to_tiles(k: Tensor) -> Tensor:
    """[B, Hk, T, D] -> float32 [B * Hk, tiles, KV_TILE, D], zeros past the end."""
    batch, num_kv_heads, length, dim = k.shape
    num_tiles = -(-length // KV_TILE)
    tiles = k.new_zeros(batch * num_kv_heads, num_tiles * KV_TILE, dim, dtype=torch.float32)
    tiles[:, :length] = k.reshape(batch * num_kv_heads, length, dim)
    return tiles.view(batch * num_kv_heads, num_tiles, KV_TILE, dim)


def _from_tiles(tiles: Tensor, like: Tensor) -> Tensor:
    batch, num_kv_heads, length, dim = like.shape
    return tiles.reshape(batch, num_kv_heads, -1, dim)[:, :, :length].to(like.dtype)


def _row_positions(batch: int, length: int, group: int, rows: int, device: torch.device) -> Tensor:
    positions = torch.full((rows,), -1, dtype=torch.int64, device=device)
    positions[: length * group] = torch.arange(length, device=device).repeat_interleave(group)
    return positions.expand(batch, rows)


def prove_row_invariance(head_dims: set[int]) -> None:
    """Check, once at start-up, that products of these head sizes treat each row alike at every height and batch here.

    Raises `NotInvariant` where they do not.
    """
    for dim in head_dims - _proven:
        if not _rows_are_independent(dim):
            raise NotInvariant(
                f"float32 batched products with head size {dim} depend on the number of rows on this CPU, even in "
                f"multiples of {ROW_TILE}"
            )
        _proven.add(dim)


_proven: set[int] = set()


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
