"""Attention of a trainer: whole sequences, with gradients, equal bit for bit to the engine's paged attention.

A batch row is one sequence, or several end to end (packed rows). The forward is the paged kernel; the backward is
C++ if that can be built, else torch, one KV tile at a time. Shapes are those of `kernels.paged_attention`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.cpu.attention_backward import attention_gradients
from rollout_engine.kernels.paged_attention import KV_TILE, TilePlan, attend, padded_rows, scores_of

DenseKernel = Callable[
    [Tensor, Tensor, Tensor, AttentionParams, Tensor | None, Sequence[int] | None], tuple[Tensor, Tensor]
]
"""q, k, v, params, sinks, lengths of `DenseAttention` -> its output, and float32 log-sum-exp of scores [B, T, H]."""


class TokensAt(torch.autograd.Function):
    """Differentiable x[:, :, tokens]: x [B, H, T, D], tokens int64 [S] -> [B, H, S, D].

    Gradients of tokens that are taken several times are summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = x.shape
        return x.index_select(2, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=torch.float32)
        return total.index_add_(2, tokens, grad.float()).to(grad.dtype), None


class DenseAttention(torch.autograd.Function):
    """Differentiable causal attention: q [B, H, T, Dk], k [B, Hk, T, Dk], v [B, Hk, T, Dv] -> [B, T, H, Dv].

    Every batch row is a sequence at positions 0..T-1. With `lengths`, which add up to B * T, the tokens row after row
    are sequences of these lengths instead, each starting at position 0 and seeing only itself (packed rows).
    `sinks` [H]: one extra logit per head in the softmax. `kernel` replaces the CPU's forward, and takes no `reach`
    int32 [B, T]: how many positions behind its own each query sees (`Reach.tokens`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        params: AttentionParams,
        sinks: Tensor | None = None,
        kernel: DenseKernel | None = None,
        lengths: Sequence[int] | None = None,
        reach: Tensor | None = None,
    ) -> Tensor:
        if kernel is not None:
            assert reach is None, "pictures are computed on a CPU alone"
            out, lse = kernel(q, k, v, params, sinks, lengths)
        else:
            own = compiled.attend_dense if q.is_cpu and compiled.supports(q.dtype) else _attend_dense
            out, lse = own(q, k, v, params, sinks, lengths, reach)
        ctx.save_for_backward(q, k, v, out, lse, sinks, reach)
        ctx.params, ctx.lengths = params, lengths
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """FlashAttention's backward: weights are recomputed tile by tile from the saved log-sum-exp."""
        q, k, v, out, lse, sinks, reach = ctx.saved_tensors
        params: AttentionParams = ctx.params
        grad_sinks = None if sinks is None else _grad_of_sinks(grad, out, lse, sinks)
        is_compiled = q.is_cpu and compiled.supports(q.dtype)
        find = attention_gradients if is_compiled else _attention_gradients
        grads = find(q, k, v, out, lse, grad, params, ctx.lengths, reach)
        return *(x.to(q.dtype) for x in grads), None, grad_sinks, None, None, None


def _attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    params: AttentionParams,
    lengths: Sequence[int] | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Eager twin of `kernels.cpu.attention_backward.attention_gradients`."""
    sequences = UnpackedSequences.of(q, lengths, k.shape[1])
    by_head = (q, k, v, out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1), grad.transpose(1, 2))
    grads = _backward_of_sequences([sequences.unpack(x) for x in by_head], sequences.plan_with(reach), params)
    return tuple(sequences.pack(x) for x in grads)


def _backward_of_sequences(
    by_head: Sequence[Tensor], plan: TilePlan, params: AttentionParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [N, H, L, Dk], k and v [N, Hk, L, D]; out, lse and grad are [N, H, L, D], D = 1 for lse."""
    q, k, v, out, lse, grad = by_head
    num_sequences, num_heads, length, _ = q.shape
    num_kv_heads = k.shape[1]
    query, grad_out, out, lse = (_to_rows(x, num_kv_heads) for x in (q, grad, out, lse))
    keys, values, lse = _to_tiles(k), _to_tiles(v), lse.squeeze(-1)
    padding = plan.positions[:, None, :, None] < 0
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values)
    for j, (count, first_row) in enumerate(plan.steps):
        heads, rows = slice(count * num_kv_heads), slice(first_row, None)
        num_keys = padded_rows(length - j * KV_TILE)  # fewer than a tile in the last one
        part, tile = (heads, rows), (heads, j, slice(num_keys))
        scores = scores_of(query[part] * params.scale, keys[tile], plan, j, num_kv_heads, params)
        weights = (scores - lse[part][..., None]).exp()
        weights.view(count, num_kv_heads, *weights.shape[1:]).masked_fill_(padding[:count, :, rows], 0.0)
        grad_scores = weights * (torch.bmm(grad_out[part], values[tile].transpose(1, 2)) - delta[part])
        if params.softcap:
            grad_scores *= (1 - (scores / params.softcap) ** 2).nan_to_num_(0.0, 0.0, 0.0)
        grad_q[part] += torch.bmm(grad_scores, keys[tile]) * params.scale
        grad_k[tile] = torch.bmm(grad_scores.transpose(1, 2), query[part]) * params.scale
        grad_v[tile] = torch.bmm(weights.transpose(1, 2), grad_out[part])
    by_token = _from_rows(grad_q, num_sequences, num_heads, length).transpose(1, 2)
    return by_token, _from_tiles(grad_k, k), _from_tiles(grad_v, v)


def _grad_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of `sinks` [H] from grad, out [B, T, H, Dv] and lse [B, T, H]."""
    weight = (sinks.float() - lse).exp()
    return -(weight * (grad.float() * out.float()).sum(-1)).sum((0, 1)).to(sinks.dtype)


def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    sinks: Tensor | None,
    lengths: Sequence[int] | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Eager twin of `kernels.cpu.attention.attend_dense`."""
    sequences = UnpackedSequences.of(q, lengths, k.shape[1])
    q, k, v = (sequences.unpack(x) for x in (q, k, v))
    num_sequences, num_heads, length, _ = q.shape
    query, keys, values = _to_rows(q, k.shape[1]), _to_tiles(k), _to_tiles(v)

    def tile(j: int, num: int) -> tuple[Tensor, Tensor]:
        return keys[: num * k.shape[1], j], values[: num * k.shape[1], j]

    out, lse = attend(query, k.shape[1], tile, sequences.plan_with(reach), params, sinks)
    by_token = (_from_rows(rows, num_sequences, num_heads, length) for rows in (out, lse.unsqueeze(-1)))
    out, lse = (sequences.pack(x.transpose(1, 2)).transpose(1, 2) for x in by_token)
    return out.to(q.dtype), lse.squeeze(-1)


def _to_rows(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> float32 [B * Hk, R, D], rows (token, head of the group), padded with zeros."""
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


class UnpackedSequences:
    """Packed sequences of a batch, unpacked to one per row, longest first.

    Without lengths the B rows of T tokens are the sequences already, and nothing is copied.
    """

    def __init__(self, batch: int, length: int, group: int, lengths: tuple[int, ...] | None, device: torch.device):
        self._shape = batch, length
        self._place: Tensor | None = None
        self.sizes = torch.tensor([length] * batch if lengths is None else lengths, device=device)
        """int64 [N]: lengths, in the order of the tokens."""
        order = self.sizes.argsort(descending=True, stable=True)
        self.rank = order.argsort()
        """int64 [N]: the row of each sequence."""
        self.num_sequences, self.length = len(self.sizes), int(self.sizes[order[0]])
        self._positions, self._group = _positions(self.sizes[order], group), group
        self.plan = TilePlan(self._positions, group)
        if lengths is not None:
            first = self.sizes.cumsum(0) - self.sizes
            owner = torch.arange(self.num_sequences, device=device).repeat_interleave(self.sizes)
            offset = torch.arange(batch * length, device=device) - first[owner]
            self._place = self.rank[owner] * self.length + offset

    @classmethod
    def of(cls, q: Tensor, lengths: Sequence[int] | None, num_kv_heads: int) -> "UnpackedSequences":
        """Sequences of q [B, H, T, D] with these lengths, which add up to B * T; None: every row is one."""
        batch, num_heads, length, _ = q.shape
        return _unpacked(
            batch, length, num_heads // num_kv_heads, None if lengths is None else tuple(lengths), q.device
        )

    def plan_with(self, reach: Tensor | None) -> TilePlan:
        """The plan of queries that see `reach` int32 [B, T] positions behind their own; None: none."""
        if reach is None:
            return self.plan
        by_token = self.unpack(reach.long()[:, None, :, None])[:, 0, :, 0].repeat_interleave(self._group, 1)
        rows = torch.zeros_like(self._positions)
        rows[:, : by_token.shape[1]] = by_token
        return TilePlan(self._positions, self._group, rows)

    def unpack(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [N, H, L, D], zeros past the end of each sequence."""
        if self._place is None:
            return x
        rows = x.new_zeros(self.num_sequences * self.length, x.shape[1], x.shape[3])
        rows[self._place] = x.transpose(1, 2).flatten(0, 1)
        return rows.view(self.num_sequences, self.length, *rows.shape[1:]).transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """[N, H, L, D] -> [B, H, T, D], the reverse of `unpack`."""
        if self._place is None:
            return x
        rows = x.transpose(1, 2).flatten(0, 1)[self._place]
        return rows.view(*self._shape, *rows.shape[1:]).transpose(1, 2)


@functools.lru_cache(maxsize=4)
def _unpacked(
    batch: int, length: int, group: int, lengths: tuple[int, ...] | None, device: torch.device
) -> UnpackedSequences:
    return UnpackedSequences(batch, length, group, lengths, device)


def _positions(lengths: Tensor, group: int) -> Tensor:
    """Positions int64 [N, R] of the rows of sequences with `lengths` int64 [N], longest first; -1 for padding."""
    rows = torch.arange(padded_rows(int(lengths[0]) * group), device=lengths.device) // group
    return rows.expand(len(lengths), -1).masked_fill(rows >= lengths[:, None], -1)
