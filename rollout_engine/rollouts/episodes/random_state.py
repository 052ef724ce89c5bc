"""Gives each episode its own states of the global random generators, in a process that plays several."""

import random
import sys
from types import TracebackType
from typing import Any, Protocol

import numpy as np


class _Generator(Protocol):
    def seed(self, seed: int) -> object: ...
    def get(self) -> Any: ...
    def set(self, state: Any) -> object: ...


class _Python:
    seed, get, set = staticmethod(random.seed), staticmethod(random.getstate), staticmethod(random.setstate)


class _Numpy:
    get, set = staticmethod(np.random.get_state), staticmethod(np.random.set_state)

    def seed(self, seed: int) -> None:
        np.random.seed(seed % 2**32)


class _Torch:
    """The CPU's generator; reached by the module's name, since nothing here imports torch."""

    def seed(self, seed: int) -> None:
        sys.modules["torch"].manual_seed(seed)

    def get(self) -> Any:
        return sys.modules["torch"].get_rng_state()

    def set(self, state: Any) -> None:
        sys.modules["torch"].set_rng_state(state)


_GENERATORS: dict[str, _Generator] = {"random": _Python(), "numpy": _Numpy(), "torch": _Torch()}


class RandomState:
    """A block in which `random`, `numpy.random` and `torch`, if imported, continue from this episode's last states.

    They begin seeded with `seed`. After the block they are in no particular state.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] = {}
        self._entered: list[str] = []

    @property
    def has_missed(self) -> bool:
        """Whether a generator was imported inside the last block, so that it did not begin with the seed there."""
        return len(_list_loaded()) > len(self._entered)

    def __enter__(self) -> None:
        self._entered = _list_loaded()
        for name in self._entered:
            if name in self._states:
                _GENERATORS[name].set(self._states[name])
            else:
                _GENERATORS[name].seed(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states = {name: _GENERATORS[name].get() for name in self._entered}


def _list_loaded() -> list[str]:
    return [name for name in _GENERATORS if hasattr(sys.modules.get(name), "__version__") or name == "random"]
