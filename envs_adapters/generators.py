"""Global random generators, lent to code that draws from them."""

import random
import threading
from types import TracebackType

import numpy as np

_lock = threading.Lock()
"""Held while the global generators are in a block's states."""


class OwnGenerators:
    """Blocks in which `random` and `numpy.random` continue as the block before left them; they begin with a seed.

        generators = OwnGenerators(seed)
        with generators:
            game.step(action)  # draws from the global generators

    Between the blocks the global generators are as they would be without them. Blocks wait for one another, whatever
    thread they are on; other code that draws meanwhile does not.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> None:
        _lock.acquire()
        self._swap()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swap()
        _lock.release()

    def _swap(self) -> None:
        python, of_numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._python, self._numpy = python, of_numpy
