"""The shapes of the states that layers keep of a sequence, in place of its keys and values, learnt by watching calls.

A layer keeps the last inputs of each of its causal convolutions, and the state of its recurrence, if it has one:

    qwen3_5, qwen3_next, olmo_hybrid, kimi_linear, bamba, falcon_h1, ...    one convolution, one recurrence
    lfm2                                                                    one convolution
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import msgspec
import torch

STATE_DTYPE = torch.float32
"""Dtype of the states of recurrences; convolutions keep inputs in the model's dtype, which loses nothing."""


class StateGeometry(msgspec.Struct, frozen=True):
    """The states that one layer keeps of a sequence."""

    convolutions: tuple[tuple[int, int], ...] = ()
    """(inputs kept, channels) of each convolution, in the order of its calls."""
    recurrence: tuple[int, int, int] | None = None
    """(heads, key size, value size); None: the layer has no recurrence."""

    def without_counts(self) -> tuple[object, ...]:
        """The sizes that a copy with fewer heads and channels has too."""
        inputs = [kept for kept, _ in self.convolutions]
        return *inputs, None if self.recurrence is None else self.recurrence[1:]

    def bytes_of(self, dtype: torch.dtype) -> int:
        """Bytes of the states of one sequence in a model of `dtype`."""
        inputs = sum(map(prod, self.convolutions)) * dtype.itemsize
        return inputs + (0 if self.recurrence is None else prod(self.recurrence) * STATE_DTYPE.itemsize)


class StateCall(msgspec.Struct, frozen=True):
    """One call of a function that keeps a state."""

    layer_idx: int | None
    module: int
    """Identity of the module that called it."""
    convolution: tuple[int, int] | None = None
    recurrence: tuple[int, int, int] | None = None


_calls: ContextVar[list[StateCall] | None] = ContextVar("state_calls", default=None)


@contextmanager
def recording_states() -> Iterator[list[StateCall]]:
    """Inside, calls of functions that keep states are recorded, and return zeros."""
    calls: list[StateCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def recorded_calls() -> list[StateCall] | None:
    """The list to which calls are added inside `recording_states`; None outside."""
    return _calls.get()


def states_by_layer(calls: list[StateCall]) -> dict[int, StateGeometry]:
    """The states of each layer that keeps any. Raises `ValueError` for calls that do not fit together."""
    found: dict[int, StateGeometry] = {}
    owners: dict[int, int] = {}
    for call in calls:
        layer = call.layer_idx
        if layer is None:
            raise ValueError("a layer that keeps a state has no layer_idx")
        if owners.setdefault(layer, call.module) != call.module:
            raise ValueError(f"two modules of layer {layer} keep states, and one is served")
        before = found.get(layer, StateGeometry())
        if call.convolution is not None:
            convolutions = (*before.convolutions, call.convolution)
            found[layer] = msgspec.structs.replace(before, convolutions=convolutions)
        elif before.recurrence is not None:
            raise ValueError(f"layer {layer} has two recurrences, and one is served")
        else:
            found[layer] = msgspec.structs.replace(before, recurrence=call.recurrence)
    return found
