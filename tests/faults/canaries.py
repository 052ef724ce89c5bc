"""Pickles that would leave a mark, planted in every field of every message and file that a peer can write.

The mark is a file: whoever unpickles a canary creates it. That nothing of ours imports pickle is a contract test; this
is the proof by trying.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

Frames = list[bytes]


class Canary:
    """One mark and its pickle."""

    def __init__(self, directory: Path) -> None:
        self._mark = directory / "unpickled"
        self.bytes = pickle.dumps(_Opening(str(self._mark)))
        self.text = self.bytes.decode("latin-1")

    def works(self) -> bool:
        """Whether unpickling leaves the mark, which is removed again."""
        pickle.loads(self.bytes).close()
        was_there = self._mark.exists()
        self._mark.unlink(missing_ok=True)
        return was_there

    def assert_silent(self) -> None:
        """AssertionError if anybody has unpickled it."""
        assert not self._mark.exists(), "a canary was unpickled"

    def planted(self, frames: Frames) -> Iterator[Frames]:
        """`frames` with the canary in place of each field in turn, of each frame in turn, and of everything."""
        yield [self.bytes]
        for i in range(1, len(frames)):
            yield [*frames[:i], self.bytes, *frames[i + 1 :]]
        message = msgspec.msgpack.decode(frames[0])
        for planted in self.planted_values(message):
            yield [msgspec.msgpack.encode(planted), *frames[1:]]

    def planted_values(self, value: Any) -> Iterator[Any]:
        """`value`, nested lists and dicts, with the canary in place of each leaf, list, dict and key in turn."""
        yield self.bytes
        yield self.text
        if isinstance(value, dict):
            for key, inner in value.items():
                rest = {k: v for k, v in value.items() if k != key}
                yield rest | {self.text: inner}
                yield from (value | {key: planted} for planted in self.planted_values(inner))
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                yield from ([*value[:i], planted, *value[i + 1 :]] for planted in self.planted_values(inner))
        elif isinstance(value, msgspec.msgpack.Ext):
            yield msgspec.msgpack.Ext(value.code, self.bytes)


class _Opening:
    """Unpickled, it is a file that was created."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")
