"""The KV pool on a device, and how Hugging Face modules attend over it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.scoring import Scoring
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention
from rollout_engine.model.attention import attending
from rollout_engine.model.device.memory import Memory
from rollout_engine.model.geometry import LayerGeometry

__all__ = ["DeviceAttention", "DeviceBatch", "DevicePool", "Limits", "ModuleStep"]


class DeviceBatch(NamedTuple):
    """One flat batch of T tokens on the device, sequences with one token first."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], of each token in its sequence."""
    slots: Tensor
    """int64 [T], where its KV goes; -1 nowhere: padding of a captured batch."""
    attention: Batch


class DevicePool:
    """KV of all layers, and the memory in which their attention is planned."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers = [
            KVLayer.zeros(
                num_blocks,
                layer.num_kv_heads,
                block_size,
                layer.head_dim_k,
                layer.head_dim_v,
                dtype=dtype,
                device=device,
            )
            for layer in geometry
        ]
        self.memory = Memory(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pool; blocks come first in its shape."""
        for layer in self.layers:
            yield from layer

    @property
    def num_resident_bytes(self) -> int:
        """What takes memory now."""
        return self.memory.num_bytes

    def release(self) -> None:
        """Forget all KV and give its memory back to the device; the next step takes it again."""
        self.memory.release()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer."""
        if pairs:
            source, destination = torch.tensor(pairs, device=self.layers[0].keys.device).unbind(1)
            for tensor in self.tensors():
                tensor[destination] = tensor[source]


class DeviceAttention:
    """One plan for all layers of the same heads."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        limits: Limits,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_ordered: bool,
    ) -> None:
        heads = [Heads(g.num_heads, g.num_kv_heads, g.head_dim_k, g.head_dim_v, dtype) for g in geometry]
        self._windows: dict[Heads, set[int]] = {each: set() for each in heads}
        for each, layer in zip(heads, geometry, strict=True):
            self._windows[each].add(layer.sliding_window or 0)
        made = {each: PagedAttention(each, limits, device, is_ordered=is_ordered) for each in self._windows}
        self._plans = made
        self._of_layer = [made[each] for each in heads]

    @property
    def prefix_shape(self) -> tuple[int, int] | None:
        """(KV positions of a unit, tokens of an item) of shared prefixes; None where heads differ between layers."""
        if len(self._plans) > 1:
            return None
        stage = self._of_layer[0].prefix
        return stage.tiling.unit, stage.tokens_per_item

    def plan(self, batch: Batch) -> None:
        """Share out the work of `batch`, for all layers."""
        for heads, plan in self._plans.items():
            plan.plan(batch, self._windows[heads])

    def attend(
        self, layer: int, q: Tensor, kv: KVLayer, scoring: Scoring, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """q [T, H, Dk] -> out [T, H, Dv] over `kv`, of the batch planned last."""
        self._of_layer[layer].attend(q, kv, scoring, out, sinks=sinks)


class ModuleStep(NamedTuple):
    """What `rollout_attention` needs to serve modules over the pool; the batch is planned."""

    pool: DevicePool
    attention: DeviceAttention
    batch: DeviceBatch

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv] of the flat batch -> [T, H, Dv]. No token is padding."""
        kv, size = self.pool.layers[layer], self.pool.block_size
        blocks, offsets = self.batch.slots // size, self.batch.slots % size
        kv.keys[blocks, :, offsets] = k
        kv.values[blocks, :, offsets] = v
        out = q.new_empty(*q.shape[:2], v.shape[2])
        self.attention.attend(layer, q.contiguous(), kv, scoring, out, sinks)
        return out

    def serving(self) -> AbstractContextManager[None]:
        """Within it, modules attend by this."""
        return attending(self)
