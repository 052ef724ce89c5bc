"""Attention over paged KV by `kernels.paged_attention`, for engines for which the C++ kernel cannot be built."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams, Reach
from rollout_engine.kernels.memory import lazy_zeros
from rollout_engine.kernels.paged_attention import KV_TILE, Tile, TilePlan, attend, padded_rows
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.modules.geometry import LayerGeometry, each_once, kv_pools


class EagerPool:
    """KV of all layers: per layer K [num_blocks, Hk, block_size, Dk] and V [..., Dv]; of latents K alone."""

    def __init__(
        self, geometry: Sequence[LayerGeometry], *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.layers = kv_pools(
            geometry,
            lambda layer: tuple(
                lazy_zeros(num_blocks, layer.num_kv_heads, block_size, dim, dtype=dtype)
                for dim in (layer.head_dim_k, layer.head_dim_v)[: 1 if layer.has_latents else 2]
            ),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pool; blocks are the first dimension of its shape."""
        for layer in each_once(self.layers.values()):
            yield from layer

    def latents(self, layer: int) -> Tensor:
        """The latents of a layer that caches them, [num_blocks, block_size, D]."""
        return self.layers[layer][0][:, 0]

    def step(self, batch: FlatBatch) -> "EagerStep":
        """Plan attention of `batch`."""
        return EagerStep(self, batch.chunks(self.block_size), batch.reach)


class EagerStep:
    """Satisfies `AttentionStep` for one batch: the slots to write, and the keys and values that its queries read."""

    def __init__(self, pool: EagerPool, chunks: Sequence[SequenceChunk], reach: Reach | None = None) -> None:
        self._pool = pool
        self._chunks, self._reach = chunks, reach
        self._batches: dict[tuple[int, int, bool], list[_Batch]] = {}
        size = pool.block_size
        positions = [c.num_computed_tokens + i for c in chunks for i in range(len(c.token_ids))]
        self.positions = torch.tensor(positions, dtype=torch.int64)
        offsets = iter(positions)
        blocks = [c.block_ids[next(offsets) // size] for c in chunks for _ in c.token_ids]
        self._slot_blocks = torch.tensor(blocks, dtype=torch.int64)
        self._slot_offsets = self.positions % size

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None
    ) -> Tensor:
        keys, *others = self._pool.layers[layer]
        keys[self._slot_blocks, :, self._slot_offsets] = k
        values = others[0] if others else keys[..., : v.shape[-1]]
        if others:
            values[self._slot_blocks, :, self._slot_offsets] = v
        num_tokens, num_heads, _ = q.shape
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        out = q.new_empty(num_tokens, num_heads, values.shape[-1])
        reach = None if self._reach is None else self._reach.of(params)
        for batch in self._batches_for(group, num_kv_heads, reach):
            rows = _gather_queries(q, batch, num_kv_heads, group)
            mixed, _ = attend(rows, num_kv_heads, _tile_reader(batch, keys, values), batch.plan, params, sinks)
            count, width = batch.tokens.shape
            by_token = mixed[:, : width * group].reshape(count, num_kv_heads, width, group, -1).transpose(1, 2)
            out[batch.tokens[batch.real]] = by_token.reshape(count, width, num_heads, -1)[batch.real].to(out.dtype)
        return out

    def _batches_for(self, group: int, num_kv_heads: int, reach: Tensor | None) -> list["_Batch"]:
        key = (group, num_kv_heads, reach is not None)
        if key not in self._batches:
            self._batches[key] = [
                _make_batch(members, self._pool.block_size, group, num_kv_heads, reach)
                for members in _by_width(self._chunks)
            ]
        return self._batches[key]


class _Batch(NamedTuple):
    """Chunks of similar length that one call computes, longest context first."""

    tokens: Tensor
    """int64 [N, Q]: each query's row of the flat batch (0 at padding)."""
    real: Tensor
    """bool [N, Q]: which entries are queries, not padding."""
    plan: TilePlan
    """Positions [N, R], R = Q * group rounded up."""
    tile_rows: list[Tensor]
    """Per tile int64 [n * Hk * blocks per tile]: rows of the pool seen as [num_blocks * Hk, block_size * D]."""
    unwritten: list[Tensor | None]
    """Per tile bool [n, 1, KV_TILE, 1]: undefined slots past the end of a context; None if there are none."""


def _by_width(chunks: Sequence[SequenceChunk]) -> Iterator[list[tuple[SequenceChunk, int]]]:
    """Groups of (chunk, start in the flat batch) with lengths 1, 2, 3-4, 5-8, ...: padding at most doubles a batch."""
    by_width: dict[int, list[tuple[SequenceChunk, int]]] = {}
    start = 0
    for chunk in chunks:
        by_width.setdefault((len(chunk.token_ids) - 1).bit_length(), []).append((chunk, start))
        start += len(chunk.token_ids)
    for members in by_width.values():
        yield sorted(members, key=lambda m: -(m[0].num_computed_tokens + len(m[0].token_ids)))


def _make_batch(
    members: list[tuple[SequenceChunk, int]], block_size: int, group: int, num_kv_heads: int, reach: Tensor | None
) -> _Batch:
    lengths = torch.tensor([len(c.token_ids) for c, _ in members])
    first = torch.tensor([c.num_computed_tokens for c, _ in members])
    width = int(lengths.max())
    offsets = torch.arange(width)
    real = offsets < lengths[:, None]
    tokens = (offsets + torch.tensor([start for _, start in members])[:, None]).masked_fill_(~real, 0)
    positions = torch.full((len(members), padded_rows(width * group)), -1, dtype=torch.int64)
    by_token = (offsets + first[:, None]).masked_fill_(~real, -1)
    positions[:, : width * group] = by_token.repeat_interleave(group, dim=1)
    seen = None
    if reach is not None:
        seen = torch.zeros_like(positions)
        seen[:, : width * group] = reach.long()[tokens].masked_fill_(~real, 0).repeat_interleave(group, dim=1)
    plan = TilePlan(positions, group, seen)
    table = _block_table([c.block_ids for c, _ in members], len(plan.steps) * (KV_TILE // block_size))
    heads = torch.arange(num_kv_heads)[:, None]
    last = first + lengths - 1
    tile_rows, unwritten = [], []
    for j, (count, _) in enumerate(plan.steps):
        blocks = table[:count].view(count, len(plan.steps), 1, -1)[:, j]  # [n, 1, blocks per tile]
        tile_rows.append((blocks * num_kv_heads + heads).flatten())
        past = torch.arange(j * KV_TILE, (j + 1) * KV_TILE) > last[:count, None]
        unwritten.append(past[:, None, :, None] if past.any() else None)
    return _Batch(tokens, real, plan, tile_rows, unwritten)


def _block_table(block_ids: list[Sequence[int]], width: int) -> Tensor:
    """int64 [N, width], cut or filled with block 0."""
    rows = [list(ids[:width]) + [0] * (width - len(ids)) for ids in block_ids]
    return torch.tensor(rows, dtype=torch.int64)


def _gather_queries(q: Tensor, batch: _Batch, num_kv_heads: int, group: int) -> Tensor:
    """q [T, H, D] -> float32 [N * Hk, R, D], zero rows at the end."""
    count, width = batch.tokens.shape
    rows = q.new_zeros(count, num_kv_heads, batch.plan.positions.shape[1], q.shape[-1], dtype=torch.float32)
    by_token = rows[:, :, : width * group].view(count, num_kv_heads, width, group, -1)
    by_token.copy_(q[batch.tokens].view(count, width, num_kv_heads, group, -1).transpose(1, 2))
    return rows.view(count * num_kv_heads, -1, q.shape[-1])


def _tile_reader(batch: _Batch, keys: Tensor, values: Tensor) -> Tile:
    def read(j: int, num_sequences: int) -> tuple[Tensor, Tensor]:
        tile_k, tile_v = (_read_tile(pool, batch.tile_rows[j]) for pool in (keys, values))
        unwritten = batch.unwritten[j]
        if unwritten is not None:  # masked values must still be finite
            tile_v.view(num_sequences, -1, *tile_v.shape[1:]).masked_fill_(unwritten, 0.0)
        return tile_k, tile_v

    return read


def _read_tile(pool: Tensor, rows: Tensor) -> Tensor:
    """Rows of `pool` [num_blocks, Hk, block_size, D] -> float32 [n * Hk, KV_TILE, D]."""
    return pool.flatten(0, 1).index_select(0, rows).view(-1, KV_TILE, pool.shape[-1]).float()
