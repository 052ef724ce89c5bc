"""Requests without a seed draw by the name of their test, so that no test depends on the tests that ran before it.

An engine numbers its requests, and a request without a seed draws by its number. An engine that several tests share
would give a test other tokens whenever another test is added, left out or run in another process, and one day they
hold an end token. Here a request's number begins again at 0 with each test, and the test's name is part of the seed.

`DRAWS=1 make test` (any text) makes other draws, of requests and of torch: a test that fails with some of them asserts
what only its usual tokens or tensors fulfil.
"""

import os
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from weakref import WeakKeyDictionary

from rollout_engine.base.seeds import mix
from rollout_engine.text.input_processor import InputProcessor


class DrawsByTest:
    """Stands in for `InputProcessor.next_seed`."""

    def __init__(self, draws: str = os.environ.get("DRAWS", "")) -> None:
        self._draws = draws
        self.begin("")

    def begin(self, name: str) -> None:
        """From now on the test `name` runs, and what its fixtures do is its own."""
        digest = sha256(f"{name} {self._draws}".encode()).digest()
        self._root = int.from_bytes(digest[:8], "big")
        self._numbers: WeakKeyDictionary[InputProcessor, count[int]] = WeakKeyDictionary()

    def torch_seed(self) -> int:
        """The seed with which torch starts each test."""
        return int.from_bytes(sha256(self._draws.encode()).digest()[:4], "big") if self._draws else 0

    def as_method(self) -> Callable[[InputProcessor], int]:
        """The method: engines of one seed draw the same within a test, as users' do from their start on."""

        def next_seed(inputs: InputProcessor) -> int:
            number = next(self._numbers.setdefault(inputs, count()))
            return mix(mix(self._root, inputs._seed), number)

        return next_seed


DRAWS = DrawsByTest()
USUAL_NEXT_SEED = InputProcessor.next_seed
