"""The position of a collector in its dataset: all that a trainer's checkpoint has to hold of it."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.rollouts.plan import GroupTask

FORMAT = 1
"""Number of the form of `state_dict`."""
SAME_DATASET = "Give the dataset that it had, from its first row and in the same order."
_MASK = (1 << 64) - 1


class OpenGroup(msgspec.Struct, array_like=True, frozen=True):
    """A group that was started and not delivered."""

    index: int
    seed: int
    row: int
    """Digest of its row."""


class Counts(msgspec.Struct):
    """Counts of a collector up to a position."""

    num_started: int = 0
    num_delivered: int = 0
    num_regenerated: int = 0
    num_dropped: int = 0


class Position(msgspec.Struct):
    """Rows that were read, and the groups of theirs that were not delivered."""

    num_rows: int = 0
    """Rows read so far."""
    rows: int = 0
    """Digest of all of them, in order."""
    open: dict[int, OpenGroup] = {}
    """By their index, which is the number of the row."""
    num_batches: int = 0
    """Batches delivered."""
    version: int = -1
    """Live version when the last batch was delivered; -1 before it."""
    num_pending: int = 0
    """Batches whose versions were not live yet then."""
    weights: dict[int, str] = {}
    """Version -> digest of its weights, for the newest ones."""
    counts: Counts = msgspec.field(default_factory=Counts)

    def copy(self) -> "Position":
        """A position of its own with the same values."""
        counts = msgspec.structs.replace(self.counts)
        return msgspec.structs.replace(self, open=dict(self.open), weights=dict(self.weights), counts=counts)


class CollectorState(msgspec.Struct, forbid_unknown_fields=True):
    """The result of `RolloutCollector.state_dict`, as plain data."""

    format: int
    identity: dict[str, Any]
    """Everything that determines the samples, by name."""
    num_rows: int
    rows: int
    open: list[OpenGroup]
    num_batches: int
    version: int
    num_pending: int
    weights: list[tuple[int, str]]
    counts: dict[str, int]


def state_of(position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A position as a dict of numbers, texts and lists, which any checkpoint can hold."""
    state = CollectorState(
        format=FORMAT,
        identity=dict(identity),
        num_rows=position.num_rows,
        rows=position.rows,
        open=[position.open[index] for index in sorted(position.open)],
        num_batches=position.num_batches,
        version=position.version,
        num_pending=position.num_pending,
        weights=sorted(position.weights.items()),
        counts=msgspec.to_builtins(position.counts),
    )
    plain: dict[str, Any] = msgspec.to_builtins(state)
    return plain


def position_of(state: Any, identity: Mapping[str, Any]) -> Position:
    """Read the result of `state_of`. Raises `RequestError` for another run's, and for one of another form."""
    bound = "a result of RolloutCollector.state_dict"
    if not isinstance(state, Mapping):
        raise RequestError.for_field("state_dict", state, bound)
    if type(state.get("format")) is int and state["format"] > FORMAT:
        hint = "A newer rollout-engine made it: load it with that one."
        raise RequestError.for_field("state_dict['format']", state["format"], f"at most {FORMAT}", hint)
    try:
        found = msgspec.convert(dict(state), CollectorState)
        counts = msgspec.convert(found.counts, Counts)
    except msgspec.ValidationError as problem:
        raise RequestError.for_field("state_dict", state, bound, f"{problem}.") from None
    check_identity("state_dict", found.identity, identity)
    return Position(
        num_rows=found.num_rows,
        rows=found.rows,
        open={group.index: group for group in found.open},
        num_batches=found.num_batches,
        version=found.version,
        num_pending=found.num_pending,
        weights=dict(found.weights),
        counts=counts,
    )


def check_identity(field: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `RequestError`, naming each difference, unless two runs draw the same samples."""
    found = [
        f"{name} was {_shorten(old)} and is {_shorten(new)}"
        for name, old, new in _differences(before, msgspec.to_builtins(dict(now)))
    ]
    if found:
        raise RequestError(
            f"{field} belongs to another run: {'; '.join(found)}. Call it with the arguments of that run, or begin "
            "another one elsewhere."
        )


def row_digest(task: GroupTask) -> int:
    """Digest of a row of a dataset: its prompt and its columns."""
    state = xxhash.xxh3_64()
    _add(state, [task.prompt, dict(task.columns)])
    return state.intdigest()


def refuse_row(task: GroupTask) -> RequestError:
    """The error for a dataset that has another row than the one that a group began with."""
    bound = "the row that its group began with"
    return RequestError.for_field(f"dataset[{task.index}]", task.prompt, bound, SAME_DATASET)


def refuse_pictures(task: GroupTask) -> RequestError:
    """The error for a row whose pictures are others than those that its samples were drawn after."""
    bound = "the pictures that its group began with"
    hint = "Files of pictures have to stay as they are as long as their groups are in a journal."
    return RequestError.for_field(f"dataset[{task.index}]", "other pictures", bound, hint)


def add_row(rows: int, row: int) -> int:
    """The digest of rows and one more."""
    return xxhash.xxh3_64_intdigest((row & _MASK).to_bytes(8, "little"), seed=rows)


def _differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            difference
            for key in sorted({*before, *now})
            for difference in _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    before, now = (list(each) if isinstance(each, tuple) else each for each in (before, now))
    return [] if before == now else [(name, before, now)]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _add(state: Any, value: Any) -> None:
    """Add a value to a digest: data by its contents, anything else by its type alone."""
    if isinstance(value, str | bytes | int | float | bool | None):
        content = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
        state.update(f"{type(value).__name__} {len(content)} ".encode() + content)
    elif isinstance(value, Mapping):
        state.update(f"map {len(value)} ".encode())
        for key, item in value.items():
            _add(state, key)
            _add(state, item)
    elif isinstance(value, list | tuple):
        state.update(f"list {len(value)} ".encode())
        for item in value:
            _add(state, item)
    elif isinstance(value, set | frozenset):
        _add(state, sorted(value, key=repr))
    elif isinstance(value, os.PathLike):
        _add(state, os.fspath(value))
    elif isinstance(value, PlacedPicture):
        _add(state, [value.start, value.end, value.picture.digest])
    elif isinstance(value, Picture):
        _add(state, value.digest)
    elif getattr(value, "ndim", 0) > 1 and callable(getattr(value, "tobytes", None)):  # an image, or rows of numbers
        _add(state, [str(value.dtype), list(value.shape), value.tobytes()])
    elif callable(getattr(value, "tolist", None)):
        _add(state, value.tolist())
    elif callable(getattr(value, "tobytes", None)):  # an image
        _add(state, [str(getattr(value, "size", "")), value.tobytes()])
    else:
        _add(state, type(value).__qualname__)
