"""Keys of indexers on the CPU, and attention of a step over the positions that they choose."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu.attention import ChunkColumns
from rollout_engine.kernels.indexed_attention import ChosenSlots, attend_chosen, choose_slots, positions_of
from rollout_engine.kernels.memory import lazy_zeros
from rollout_engine.model.modules.attention_interface import AttentionStep
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.indexed_attention import Index


class IndexKeys:
    """The keys that indexers cache next to the latents of all positions."""

    def __init__(
        self, geometry: Sequence[LayerGeometry], *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.layers = {
            number: lazy_zeros(num_blocks, block_size, layer.index_dim, dtype=dtype)
            for number, layer in enumerate(geometry)
            if layer.index_dim
        }
        """[num_blocks, block_size, D] of each layer that has an indexer."""

    def step(self, step: AttentionStep, latents: Callable[[int], Tensor], columns: ChunkColumns) -> AttentionStep:
        """The attention of a flat batch: `step` itself if no layer has an indexer.

        `latents`: finds the cached latents [num_blocks, block_size, D] of a layer.
        """
        return CpuIndexedStep(self.layers, step, latents, columns) if self.layers else step


class CpuIndexedStep:
    """Satisfies `IndexedStep`: attention to all positions is that of another step, which has the same pool."""

    def __init__(
        self,
        index_keys: dict[int, Tensor],
        step: AttentionStep,
        latents: Callable[[int], Tensor],
        columns: ChunkColumns,
    ) -> None:
        self._index_keys, self._step, self._latents, self._columns = index_keys, step, latents, columns
        size = next(iter(index_keys.values())).shape[1]
        positions = positions_of(columns)
        starts = np.repeat(columns.block_starts, np.diff(columns.token_starts))
        blocks, offsets = columns.blocks.reshape(-1)[starts + positions // size].astype(np.int64), positions % size
        self._slots = torch.from_numpy(blocks * size + offsets)
        """int64 [T]: the slot of each token."""
        self._new_blocks = torch.from_numpy(blocks[offsets == 0])
        self._last_position = int(positions.max(initial=-1))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None
    ) -> Tensor:
        return self._step.attend(layer, q, k, v, params, sinks)

    def attend_chosen(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, index: Index
    ) -> Tensor:
        chosen = index.choose_slots(self._choose)
        if chosen is None:
            return self._step.attend(layer, q, k, v, params)
        latents = self._latents(layer)
        latents[self._new_blocks] = 0.0  # dense attention reads slots not written yet, with weights of zero
        rows = latents.flatten(0, 1)
        rows[self._slots] = k[:, 0]
        return attend_chosen(q, rows, v.shape[-1], chosen, params)[0]

    def _choose(self, index: Index) -> ChosenSlots | None:
        """Write the keys of an index, and choose the slots of each token; None if it chooses all positions."""
        keys = self._index_keys[index.layer]
        keys.flatten(0, 1)[self._slots] = index.keys[0]
        if self._last_position < index.topk:
            return None
        q, weights = index.q[0], index.weights[0]
        return choose_slots(q, weights, keys, self._columns, topk=index.topk, scale=index.scale)
