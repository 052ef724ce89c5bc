"""The pools of KV and of states on a device, and how Hugging Face modules attend over KV."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.state_chunks import ChunkTensors, StateChunks
from rollout_engine.kernels.triton.adapters import AdapterBatch
from rollout_engine.kernels.triton.block_copies import BlockCopies
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention
from rollout_engine.model.cuda.memory import ReleasableMemory
from rollout_engine.model.cuda.upload import upload
from rollout_engine.model.modules.geometry import LayerGeometry, each_once, kv_pools
from rollout_engine.model.modules.state_pool import StatePool

__all__ = ["CudaAttention", "CudaBatch", "CudaKVPool", "Limits", "ModuleStep"]


class CudaBatch(NamedTuple):
    """One flat batch of T tokens on the device, sequences with one token first."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], position of each token in its sequence."""
    slots: Tensor
    """int64 [T], KV slot of each token; -1: none, in the padding of a captured batch."""
    attention: Batch
    adapters: AdapterBatch | None = None
    """The rows that have an adapter; None: none has."""
    routed: Tensor | None = None
    """int32 [T, layers with experts, k], experts to send tokens to; -1: those that routers choose. None: all those."""
    states: StateChunks | ChunkTensors | None = None
    """The slots of states that its sequences read and write, on the device for a captured batch; None: no layer keeps
    any."""


class CudaKVPool:
    """The KV pool of all layers that attend, and the states of layers that keep some, in `num_state_slots` slots."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        routing: RoutingInfo | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """`routing`: routers whose choices are kept next to the KV."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = torch.device(device)
        self.layers = kv_pools(
            geometry,
            lambda layer: KVLayer.zeros(
                num_blocks,
                layer.num_kv_heads,
                block_size,
                layer.head_dim_k,
                layer.head_dim_v,
                dtype=dtype,
                device=device,
                has_latents=layer.has_latents,
            ),
        )
        self.states = StatePool(geometry, num_slots=num_state_slots, dtype=dtype, device=self.device)
        self.routed: Tensor | None = None
        """uint8 or int16 [num_blocks, block_size, layers with experts, k]; None without routers."""
        if routing is not None:
            kept = torch.uint8 if routing.dtype == np.uint8 else torch.int16
            self.routed = torch.zeros(num_blocks, block_size, *routing.shape, dtype=kept, device=device)
        self.memory = ReleasableMemory([*self.tensors(), *self.states.tensors()])
        self._copies: BlockCopies | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of KV; blocks are the first dimension of its shape."""
        for layer in each_once(self.layers.values()):
            yield from layer.own_tensors
        if self.routed is not None:
            yield self.routed

    @property
    def routed_rows(self) -> Tensor:
        """`routed` by KV slot: [slots, layers with experts, k]."""
        assert self.routed is not None, "only mixtures keep routed experts"
        return self.routed.flatten(0, 1)

    @property
    def num_resident_bytes(self) -> int:
        """Bytes held on the device now."""
        return self.memory.num_bytes

    def release(self) -> None:
        """Forget all KV and states and give their memory back to the device; the next step takes it again."""
        self._copies = None  # it holds addresses
        self.memory.release()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer, reading each before it is written: one upload that
        nothing waits for, and one launch, but for a block that an earlier pair reads and a later one writes."""
        if not pairs or not self.layers:
            return
        if self._copies is None:
            self._copies = BlockCopies(list(self.tensors()))
        (on_device,) = upload([np.array(pairs, np.int64)], self.device)
        for start, end in _independent(pairs):
            self._copies.run(on_device[start:end])


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Bounds of runs of pairs in which no block is read and written; in one launch they have no order."""
    start, read = 0, set[int]()
    for index, (source, destination) in enumerate(pairs):
        if destination in read:
            yield start, index
            start, read = index, set()
        read.add(source)
    yield start, len(pairs)


class CudaAttention:
    """Attention of all layers; layers with the same heads share one plan."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        limits: Limits,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
        block_size: int,
    ) -> None:
        """`block_size`: KV positions of a block."""
        heads = {
            index: Heads.of(g.num_heads, g.num_kv_heads, g.head_dim_k, g.head_dim_v, dtype, has_latents=g.has_latents)
            for index, g in enumerate(geometry)
            if g.attends
        }
        self._windows: dict[Heads, set[int]] = {each: set() for each in heads.values()}
        for index, each in heads.items():
            self._windows[each].add(geometry[index].sliding_window or 0)
        how: dict[str, Any] = {"deterministic": deterministic, "block_size": block_size}
        made = {each: PagedAttention(each, limits, device, **how) for each in self._windows}
        self._plans = made
        self._of_layer = {index: made[each] for index, each in heads.items()}

    @property
    def prefix_shape(self) -> tuple[int, int] | None:
        """(KV positions per unit, tokens per item) of shared prefixes; None if heads differ between layers."""
        (plan, *others) = self._plans.values() or [None]
        return None if others or plan is None else plan.prefix_shape

    def plan(self, batch: Batch) -> None:
        """Plan the work of `batch` for all layers."""
        for heads, plan in self._plans.items():
            plan.plan(batch, self._windows[heads])

    def attend(
        self, layer: int, q: Tensor, kv: KVLayer, params: AttentionParams, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """q [T, H, Dk] -> out [T, H, Dv] over `kv`, for the batch planned last."""
        self._of_layer[layer].attend(q, kv, params, out, sinks=sinks)


class ModuleStep(NamedTuple):
    """Satisfies `AttentionStep` for modules that run a planned batch, without padding, over the pool."""

    pool: CudaKVPool
    attention: CudaAttention
    batch: CudaBatch

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None
    ) -> Tensor:
        kv, size = self.pool.layers[layer], self.pool.block_size
        blocks, offsets = self.batch.slots // size, self.batch.slots % size
        kv.keys[blocks, :, offsets] = k
        if not kv.has_latents:
            kv.values[blocks, :, offsets] = v
        out = q.new_empty(*q.shape[:2], v.shape[2])
        self.attention.attend(layer, q.contiguous(), kv, params, out, sinks)
        return out
