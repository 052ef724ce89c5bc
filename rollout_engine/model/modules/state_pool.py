"""The pool of states that layers keep of a sequence in place of keys and values.

A slot holds the states of one sequence, of all layers. A step reads the states of a chunk in one slot, and writes them
to that one or to others (`StateChunks`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rollout_engine.kernels.memory import lazy_zeros
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.mixer_functions import LayerStates, StateStep, keeping_states
from rollout_engine.model.modules.state_geometry import STATE_DTYPE, StateGeometry


class StatePool:
    """The states of all layers in `num_slots` slots on a device; without layers that keep any it is empty."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """`device`: None: the host, whose memory is taken by the first write of a slot."""

        def zeros(*shape: int, of: torch.dtype) -> Tensor:
            if device is None:
                return lazy_zeros(num_slots, *shape, dtype=of)
            return torch.zeros(num_slots, *shape, dtype=of, device=device)

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
