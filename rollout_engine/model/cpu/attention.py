"""The pools of KV and of states on the CPU, and how Hugging Face modules attend over KV."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams, Reach
from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.memory import lazy_zeros, release_pages, resident_bytes
from rollout_engine.model.cpu.eager_attention import EagerPool
from rollout_engine.model.cpu.flat_batch import FlatBatch
from rollout_engine.model.cpu.indexed import IndexKeys
from rollout_engine.model.modules.attention_interface import attending
from rollout_engine.model.modules.geometry import LayerGeometry, each_once, kv_pools
from rollout_engine.model.modules.state_pool import StatePool


class CpuKVPool:
    """The KV pool of all layers, in the model's dtype, for the C++ kernel, or its eager twin if that cannot run.

    `states` are those of layers that keep some, in `num_state_slots` slots.
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        num_state_slots: int = 0,
    ) -> None:
        pool = CompiledPool if compiled.supports(dtype) else EagerPool
        self._pool = pool(geometry, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.states = StatePool(geometry, num_slots=num_state_slots, dtype=dtype)
        self._index_keys = IndexKeys(geometry, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.block_size = block_size
        self._shape = num_blocks, block_size
        self._columns: list[Tensor] = []
        """Other values of each token, which are moved with its KV."""

    @contextmanager
    def step(self, batch: FlatBatch) -> Iterator[None]:
        """Inside, attention and mixers of this thread's forwards run over the chunks of `batch`."""
        step = self._index_keys.step(self._pool.step(batch), self._pool.latents, batch.columns)
        with attending(step), self.states.step(batch.states):
            yield

    def add_column(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor [num_blocks, block_size, *shape] whose blocks are copied and released with those of the KV."""
        self._columns.append(lazy_zeros(*self._shape, *shape, dtype=dtype))
        return self._columns[-1]

    def plan(self, batch: FlatBatch) -> compiled.AttentionPlan:
        """The C++ kernel's plan of attention over `batch`."""
        assert isinstance(self._pool, CompiledPool), "the eager twin has no plan"
        return self._pool.plan(batch)

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of KV and states that take memory now."""
        return resident_bytes([*self.tensors(), *self.states.tensors()])

    def release(self) -> None:
        """Forget all KV and states and give their memory back to the system; later writes take it again."""
        release_pages([*self.tensors(), *self.states.tensors()])

    @property
    def layers(self) -> list[compiled.KVLayer]:
        """The layers of the C++ kernel's pool that attend, in order."""
        assert isinstance(self._pool, CompiledPool), "the eager twin has no such layers"
        return list(self._pool.layers.values())

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of KV; blocks are the first dimension of its shape."""
        yield from self._pool.tensors()
        yield from self._index_keys.layers.values()
        yield from self._columns

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for tensor in self.tensors():
            tensor[destination] = tensor[source]


class CompiledPool:
    """KV of all layers in the layout of `kernels.cpu.attention`."""

    def __init__(
        self, geometry: Sequence[LayerGeometry], *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.layers = kv_pools(
            geometry,
            lambda layer: compiled.KVLayer(
                num_blocks,
                layer.num_kv_heads,
                layer.head_dim_k,
                layer.head_dim_v,
                block_size=block_size,
                dtype=dtype,
                has_latents=layer.has_latents,
            ),
        )
        self._num_kv_heads = min((layer.num_kv_heads for layer in geometry if layer.attends), default=1)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pool; blocks are the first dimension of its shape."""
        for layer in each_once(self.layers.values()):
            yield from layer.tensors()

    def latents(self, layer: int) -> Tensor:
        """The latents of a layer that caches them, [num_blocks, block_size, D]."""
        return self.layers[layer].keys

    def plan(self, batch: FlatBatch) -> compiled.AttentionPlan:
        """Plan attention of `batch`."""
        return compiled.AttentionPlan(batch.columns, block_size=self.block_size, num_kv_heads=self._num_kv_heads)

    def step(self, batch: FlatBatch) -> "_CompiledStep":
        """Attention of `batch`, for modules."""
        return _CompiledStep(self, self.plan(batch), batch.reach)


class _CompiledStep(NamedTuple):
    """Satisfies `AttentionStep` for one batch."""

    pool: CompiledPool
    plan: compiled.AttentionPlan
    reach: Reach | None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None
    ) -> Tensor:
        reach = None if self.reach is None else self.reach.of(params)
        return self.pool.layers[layer].attend(self.plan, q, k, v, params, sinks=sinks, reach=reach)
