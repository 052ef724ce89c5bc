"""The pool of states on the CPU, which layers keep of a sequence in place of keys and values.

A slot holds the states of one sequence, of all layers. A step reads the states of a chunk in one slot, and writes them
to that one or to others (`StateChunks`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.kernels.memory import lazy_zeros
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.mixer_functions import LayerStates, StateStep, keeping_states
from rollout_engine.model.modules.state_geometry import STATE_DTYPE, StateGeometry


class CpuStatePool:
    """The states of all layers in `num_slots` slots; without layers that keep any it is empty."""

    def __init__(self, geometry: Sequence[LayerGeometry], *, num_slots: int, dtype: torch.dtype) -> None:
        def zeros(*shape: int, of: torch.dtype) -> Tensor:
            return lazy_zeros(num_slots, *shape, dtype=of)

        def make(state: StateGeometry) -> LayerStates:
            shape = state.recurrence
            recurrence = None if shape is None else zeros(*shape, of=STATE_DTYPE)
            return LayerStates([zeros(*kept, of=dtype) for kept in state.convolutions], recurrence)

        self.layers = [None if layer.state is None else make(layer.state) for layer in geometry]
        self.num_slots = num_slots

    @property
    def is_empty(self) -> bool:
        """Whether no layer keeps a state."""
        return all(layer is None for layer in self.layers)

    @contextmanager
    def step(self, chunks: StateChunks | None) -> Iterator[None]:
        """Inside, mixers of this thread's forwards read and write the slots of `chunks`.

        Raises `ValueError` if layers keep states and there are no chunks.
        """
        if self.is_empty:
            yield
            return
        if chunks is None:
            raise ValueError("Layers of this model keep states, and the batch names no slots of them.")
        with keeping_states(StateStep(chunks, self.layers)):
            yield

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pool; slots are the first dimension of its shape."""
        for layer in self.layers:
            if layer is not None:
                yield from layer.convolutions
                yield from () if layer.recurrence is None else (layer.recurrence,)


class StateSlots:
    """The slot of each sequence's states, by sequence id: a step names it when it changes."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget the slots of sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._slots.pop(sequence_id, None)

    def chunks(self, scheduled: Sequence[ScheduledSequence], token_starts: np.ndarray) -> StateChunks:
        """The slots that the chunks of a step read and write; they start at `token_starts` int64 [N + 1].

        Raises `ValueError` for a sequence that has no slot.
        """
        sources, counts, ends, slots = [], [0], [], []
        for chunk, start in zip(scheduled, token_starts.tolist(), strict=False):
            move = chunk.state
            if move is None:
                sources.append(self._slot_of(chunk.sequence_id))
            else:
                sources.append(move.source)
                self._slots[chunk.sequence_id] = move.slot
                for num_tokens, slot in move.others:
                    ends.append(start + num_tokens)
                    slots.append(slot)
            ends.append(start + chunk.num_scheduled_tokens)
            slots.append(self._slots[chunk.sequence_id])
            counts.append(len(slots))
        written, behind = np.array(slots, np.int64), np.array(ends, np.int64)
        return StateChunks(token_starts, np.array(sources, np.int64), np.array(counts, np.int64), behind, written)

    def _slot_of(self, sequence_id: int) -> int:
        if sequence_id not in self._slots:
            raise ValueError(f"Sequence {sequence_id} is computed without a slot for its states.")
        return self._slots[sequence_id]
