"""Sparse attention of DeepSeek-V3.2: an indexer chooses positions of the context, and queries attend to those alone.

    choose_slots      scores of every query and earlier position; the `topk` highest, of equal ones the lowest positions
    attend_chosen     attention over latents at these slots, in tiles of 64 of them, ascending by position

A slot is the row of a position in a pool, block * block_size + offset. As long as there are no more than `topk`
positions all are chosen, and results have the bits of dense attention over the same latents. The bits of a query depend
on its own context alone, so an engine, whose pool is paged, and a trainer, whose pool is its batch, agree.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.cpu import indexer
from rollout_engine.kernels.cpu.attention import AttentionPlan, ChunkColumns, KVLayer
from rollout_engine.kernels.paged_attention import KV_TILE, TilePlan, attend, padded_rows

_PIECE = 1 << 24
"""Most numbers of latents that the gradient copies at a time."""


class ChosenSlots(NamedTuple):
    """The slots that each of T queries attends to."""

    slots: Tensor
    """int32 [T, W], ascending by position, then -1."""
    counts: Tensor
    """int64 [T], at least 1: how many of them each query has."""
    run_starts: np.ndarray
    """int64 [M + 1]: starts of runs of queries, then T. A run reads the slots of its last query, each one more."""

    @classmethod
    def of(cls, slots: Tensor, counts: Tensor, token_starts: np.ndarray) -> "ChosenSlots":
        """Find the runs in chunks that begin at `token_starts`: queries that attend to all positions, or one other."""
        numbers = counts.numpy()
        begins = np.append(True, numbers[1:] != numbers[:-1] + 1)[: len(numbers)]
        begins[token_starts[:-1][token_starts[:-1] < len(numbers)]] = True
        return cls(slots, counts, np.append(np.flatnonzero(begins), len(numbers)))


def choose_slots(
    q: Tensor, weights: Tensor, keys: Tensor, columns: ChunkColumns, *, topk: int, scale: float
) -> ChosenSlots:
    """Choose the slots of the queries q [T, H, D] of a flat batch, whose own keys are in the pool already.

    weights float32 [T, H], keys [num_blocks, block_size, D] in the dtype of `q`. The score of a position with key k is
    sum(weights * relu(q @ k * scale)) over the heads, in float32.
    """
    counts = torch.from_numpy(positions_of(columns) + 1).clamp(max=topk)
    width = int(counts.max()) if len(counts) else 0
    q, weights = q.contiguous(), weights.contiguous()
    if q.is_cpu and compiled.supports(q.dtype):
        slots = indexer.choose(q, weights, keys, columns, topk=topk, scale=scale, width=width)
    else:
        slots = _choose_eagerly(q.float(), weights, keys, columns, counts.tolist(), scale)
    return ChosenSlots.of(slots, counts, columns.token_starts)


def positions_of(columns: ChunkColumns) -> np.ndarray:
    """int64 [T]: the position of each token of a flat batch in its sequence."""
    lengths = np.diff(columns.token_starts)
    shifts = np.repeat(columns.first_positions - columns.token_starts[:-1], lengths)
    positions: np.ndarray = np.arange(columns.token_starts[-1]) + shifts
    return positions


def attend_chosen(
    q: Tensor, rows: Tensor, dim_v: int, chosen: ChosenSlots, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attend with q [T, H, Dk] to the chosen ones of `rows` [num_slots, Dk] -> [T, H, Dv], log-sum-exp [T, H].

    Values are the first `dim_v` channels. Windows, soft caps and sinks are not supported.
    """
    if not (q.is_cpu and compiled.supports(q.dtype)):
        return _attend_eagerly(q, rows, dim_v, chosen, params)
    starts, width = chosen.run_starts, chosen.slots.shape[1]
    first_positions, tables = chosen.counts.numpy()[starts[:-1]] - 1, (starts[1:] - 1) * width
    columns = ChunkColumns(first_positions, starts, chosen.slots.numpy(), tables)
    plan = AttentionPlan(columns, block_size=1, num_kv_heads=1)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return KVLayer.of_rows(rows, dim_v).attend(plan, q, None, None, params, lse=lse), lse


class ChosenAttention(torch.autograd.Function):
    """Differentiable `attend_chosen`: q [T, H, Dk], keys [T, Dk], values [T, Dv], their first channels -> [T, H, Dv].

    The choice has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, chosen: ChosenSlots, params: AttentionParams
    ) -> Tensor:
        out, lse = attend_chosen(q, keys.contiguous(), values.shape[-1], chosen, params)
        ctx.save_for_backward(q, keys, values, out, lse, chosen.slots, chosen.counts)
        ctx.params = params
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, out, lse, slots, counts = ctx.saved_tensors
        scale, grads = ctx.params.scale, [torch.zeros_like(x, dtype=torch.float32) for x in (q, keys, values)]
        size = max(1, _PIECE // (slots.shape[1] * keys.shape[1]))
        for first in range(0, len(q), size):
            piece = slice(first, first + size)
            query, grad_out = q[piece].float(), grad[piece].float()
            delta = (grad_out * out[piece].float()).sum(-1, keepdim=True)
            read = slots[piece].long().clamp(min=0)
            hidden = torch.arange(slots.shape[1]) >= counts[piece, None]
            own_keys, own_values = keys[read].float(), values[read].float()
            weights = (torch.bmm(query, own_keys.mT) * scale - lse[piece, :, None]).exp()
            weights = weights.masked_fill(hidden[:, None], 0.0)
            grad_scores = weights * (torch.bmm(grad_out, own_values.mT) - delta) * scale
            grads[0][piece] = torch.bmm(grad_scores, own_keys)
            for total, part in zip(grads[1:], ((grad_scores, query), (weights, grad_out)), strict=True):
                total.index_add_(0, read.flatten(), torch.bmm(part[0].mT, part[1]).flatten(0, 1))
        return *(x.to(q.dtype) for x in grads), None, None


def _choose_eagerly(
    q: Tensor, weights: Tensor, keys: Tensor, columns: ChunkColumns, counts: list[int], scale: float
) -> Tensor:
    """The eager twin: sums have the order of the kernel, and each product is rounded."""
    size = keys.shape[1]
    slots = torch.full((len(q), max(counts, default=0)), -1, dtype=torch.int32)
    tables = torch.from_numpy(columns.blocks.reshape(-1)).long()
    for row, first in enumerate(columns.first_positions.tolist()):
        begin, end = columns.token_starts[row : row + 2].tolist()
        positions = torch.arange(first + end - begin)
        places = tables[columns.block_starts[row] + positions // size] * size + positions % size
        channels = keys.flatten(0, 1)[places].float().T
        for token in range(begin, end):
            count, num_seen = counts[token], first + token - begin + 1
            seen = _scores(q[token], weights[token], channels[:, :num_seen], scale) if count < num_seen else None
            best = positions[:count] if seen is None else seen.sort(descending=True, stable=True).indices[:count]
            slots[token, :count] = places[best.sort().values].int()
    return slots


def _scores(q: Tensor, weights: Tensor, channels: Tensor, scale: float) -> Tensor:
    """q [H, D], weights [H] and keys by channel [D, L] -> [L]; every element has one order of sums."""
    products = q.new_zeros(len(q), channels.shape[1])
    for channel, column in zip(channels, q.T, strict=True):
        products += column[:, None] * channel
    total = q.new_zeros(channels.shape[1])
    for weight, product in zip(weights, products.mul_(scale).relu_(), strict=True):
        total += weight * product
    return total


def _attend_eagerly(
    q: Tensor, rows: Tensor, dim_v: int, chosen: ChosenSlots, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """The eager twin: every token is a sequence whose keys are those chosen."""
    num_tokens, num_heads, dim = q.shape
    order = chosen.counts.argsort(descending=True, stable=True)
    slots = chosen.slots[order].long().clamp(min=0)
    slots = torch.nn.functional.pad(slots, (0, -slots.shape[1] % KV_TILE))
    query = q.new_zeros(num_tokens, padded_rows(num_heads), dim, dtype=torch.float32)
    query[:, :num_heads] = q[order]
    last = (chosen.counts[order] - 1)[:, None]
    positions = torch.where(torch.arange(query.shape[1]) < num_heads, last, -1)

    def tile(j: int, count: int) -> tuple[Tensor, Tensor]:
        part = slice(j * KV_TILE, (j + 1) * KV_TILE)
        unused = torch.arange(part.start, part.stop) > last[:count]
        keys = rows[slots[:count, part]].float().masked_fill_(unused[..., None], 0.0)  # masked values must be finite
        return keys, keys[..., :dim_v]

    out, lse = attend(query, 1, tile, TilePlan(positions, num_heads), params)
    back = order.argsort()
    return out[back, :num_heads].to(q.dtype), lse[back, :num_heads]
