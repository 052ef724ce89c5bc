"""The attention function that Hugging Face modules call: over our paged KV inside the engine, dense on a trainer.

Inside `PagedKV.step(...)` keys and values go to their slots and queries read the block tables; outside, every batch
row is a sequence of its own that starts at position 0 (`rollout_engine.exact`).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout_engine.errors import ConfigError
from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.dense_attention import Dense, DenseAttention
from rollout_engine.kernels.memory import give_back, resident_bytes
from rollout_engine.kernels.scoring import Scoring
from rollout_engine.model.chunk import FlatBatch, SequenceChunk
from rollout_engine.model.eager_attention import EagerPool, EagerStep
from rollout_engine.model.geometry import HARMLESS_TENSORS, LayerGeometry
from rollout_engine.model.packed_rows import packed_rows_expected, sequence_lengths

ATTENTION_NAME = "rollout_engine"
_active = threading.local()
__all__ = [
    "ATTENTION_NAME",
    "AttentionStep",
    "PagedKV",
    "SequenceChunk",
    "attending",
    "current_step",
    "rollout_attention",
]


class AttentionStep(Protocol):
    """Where the keys and values of a step go, and what its queries read."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv] of the flat batch -> [T, H, Dv]."""
        ...


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Within it, attention of this thread's forwards is that of `step`."""
    _active.step = step
    try:
        yield
    finally:
        _active.step = None


def current_step() -> AttentionStep | None:
    """Of this thread, inside `attending`."""
    step: AttentionStep | None = getattr(_active, "step", None)
    return step


class PagedKV:
    """The KV pool of all layers, in the model's dtype: the C++ kernel's, or its eager twin's where that cannot be."""

    def __init__(
        self, geometry: Sequence[LayerGeometry], *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        pool = CompiledPool if compiled.serves(dtype) else EagerPool
        self._pool = pool(geometry, num_blocks=num_blocks, block_size=block_size, dtype=dtype)

    @contextmanager
    def step(self, batch: FlatBatch) -> "Iterator[_CompiledStep | EagerStep]":
        """Within it, attention of this thread's forwards runs over the chunks of `batch`."""
        step = self._pool.step(batch)
        with attending(step):
            yield step

    @property
    def num_resident_bytes(self) -> int:
        """Of the pool, what takes memory now."""
        return resident_bytes(self._pool.tensors())

    def release(self) -> None:
        """Forget all KV and give its memory back to the system; what is written from now on takes it again."""
        give_back(self._pool.tensors())

    @property
    def layers(self) -> list[compiled.Layer]:
        """Pools of the C++ kernel."""
        assert isinstance(self._pool, CompiledPool), "the eager twin has no such layers"
        return self._pool.layers

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pool; blocks come first in its shape."""
        return self._pool.tensors()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for tensor in self._pool.tensors():
            tensor[destination] = tensor[source]


class CompiledPool:
    """KV of all layers in the layout of `kernels.cpu.attention`."""

    def __init__(
        self, geometry: Sequence[LayerGeometry], *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.layers = [
            compiled.Layer(
                num_blocks,
                layer.num_kv_heads,
                layer.head_dim_k,
                layer.head_dim_v,
                block_size=block_size,
                dtype=dtype,
            )
            for layer in geometry
        ]
        self._num_kv_heads = min(layer.num_kv_heads for layer in geometry)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pool; blocks come first in its shape."""
        for layer in self.layers:
            yield from (layer.keys, layer.values)

    def step(self, batch: FlatBatch) -> "_CompiledStep":
        """What attention needs to compute `batch`."""
        plan = compiled.Plan(batch.columns, block_size=self.block_size, num_kv_heads=self._num_kv_heads)
        return _CompiledStep(self, plan)


class _CompiledStep(NamedTuple):
    pool: CompiledPool
    plan: compiled.Plan

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv] of the flat batch -> [T, H, Dv]."""
        return self.pool.layers[layer].attend(self.plan, q, k, v, scoring, sinks=sinks)


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    dense: Dense | None = None,
    step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: q [B, H, T, D], k and v [B, Hk, T, D] -> ([B, T, H, Dv], None).

    Outside a step, `position_ids` that start again within a row mark packed sequences (`model.packed_rows`).
    `s_aux` [H] are attention sinks. `dense`: what computes outside a step, where it is not the CPU. `step`: who
    attends, whether this thread is in a step or not.
    """
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} asks for a mask of its own or bidirectional attention: not served.")
    if dropout:
        raise ConfigError(
            f"{type(module).__name__} drops attention weights at random (p={dropout}), which no engine does. Load the "
            "model with attention_dropout=0.0, or call model.eval()."
        )
    strangers = [name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in HARMLESS_TENSORS]
    if strangers:
        raise ConfigError(f"{type(module).__name__} passes {', '.join(strangers)} to attention: not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window or 0, softcap or 0.0)
    step = step or current_step()
    if step is None:
        lengths = _packed_lengths(module, query, key, kwargs.get("position_ids"))
        return DenseAttention.apply(query, key, value, scoring, s_aux, dense, lengths), None
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(module.layer_idx, *flat, scoring, s_aux).unsqueeze(0), None  # type: ignore[arg-type]


def _packed_lengths(
    module: nn.Module, query: Tensor, key: Tensor, position_ids: Tensor | None
) -> tuple[int, ...] | None:
    """Lengths of the packed sequences of a trainer's batch, None where every row is one."""
    batch, _, length, _ = query.shape
    if key.shape[2] != length:
        raise ConfigError(
            f"{type(module).__name__} was given {length} queries for {key.shape[2]} keys, but an exact model computes "
            "whole sequences. Pass use_cache=False, or generate with the engine."
        )
    if position_ids is None and packed_rows_expected():
        raise ConfigError(
            f"{type(module).__name__} does not hand position_ids to attention, so packed rows would see one another. "
            "Give this model one sequence a row."
        )
    return sequence_lengths(position_ids, batch, length)


AttentionInterface.register(ATTENTION_NAME, rollout_attention)
