"""The journal of one run: a directory of segments, to which one process at a time appends records.

    lock                    held while a process writes
    segment-000001.log      frames (`rollouts.journal.frames`): a `Head`, then records of the run
    segment-000002.log      begins when the one before is full; its head sums up all earlier segments

A segment gets its name when its head is on the disk, and no longer changes when the next one begins. Records that are
appended survive the process; those before a `sync` survive the machine. Old segments are removed from the first one
on, as far as their records are needed no more.
"""

import fcntl
import logging
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.rollouts.journal.frames import (
    MAGIC,
    AlteredError,
    encode_frame,
    end_of,
    first_seed,
    read_frames,
    write_all,
)
from rollout_engine.rollouts.journal.records import RecordCodec, RecordError

logger = logging.getLogger("rollout_engine")

FORMAT = 1
"""Number of the form of these files; a journal of a higher one is not read."""
_NAME = re.compile(r"segment-(\d{6,})\.log")
_LOCK = "lock"
_MAX_BYTES = (1 << 32) - 1
"""Bytes of a record at most."""
_open: "weakref.WeakSet[Journal]" = weakref.WeakSet()
"""Open journals of this process. A fork of it closes them: it would hold the lock when its parent is dead."""


def _close_in_fork() -> None:
    for journal in [*_open]:
        journal.close()


os.register_at_fork(after_in_child=_close_in_fork)


class JournalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A journal's directory and bounds: `collect(journal=JournalOptions(directory=...))`."""

    directory: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=1 << 12)] = 64 << 20
    """Bytes of a segment from which the next one begins."""
    keep_segments: Annotated[int, msgspec.Meta(ge=0)] = 4
    """Full segments that are kept although all their groups were delivered, so that `load_state_dict` can deliver
    these again. Groups of segments that were removed are sampled again."""
    progress_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    """New tokens of an unfinished sample from which they are appended: at most about this number is sampled again."""

    @classmethod
    def of(cls, given: Any) -> "JournalOptions":
        """Convert `journal=`: a directory, or these options. Raises `RequestError`."""
        if isinstance(given, JournalOptions):
            fields = msgspec.structs.asdict(given)
        elif isinstance(given, str | os.PathLike) and os.fspath(given):
            fields = {"directory": os.fspath(given)}
        else:
            raise RequestError.for_field("journal", given, "a directory, or JournalOptions(directory=...)")
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as problem:
            raise RequestError.for_field("journal", given, "JournalOptions", f"{problem}.") from None


class Head(msgspec.Struct, tag="head", frozen=True):
    """The first record of a segment."""

    format: int
    kind: str
    """The verb whose run this is."""
    identity: dict[str, Any]
    """Everything that determines the run's samples, by name."""
    state: msgspec.Raw
    """All that the earlier segments amount to, in a form of the kind."""
    earlier_bytes: int = 0
    """Size of the segment before it."""
    earlier_checksum: int = 0
    """Checksum of the last frame of that segment."""


class Location(NamedTuple):
    """The place of a record."""

    segment: int
    start: int
    length: int


_heads: RecordCodec[Head] = RecordCodec(Head)


class Journal:
    """An open journal. Made by `Journal.open`; `close` it, so that another process may continue.

    Not for several threads at once. After a failed write it is closed.
    """

    def __init__(self, options: JournalOptions, kind: str) -> None:
        self.options, self._kind = options, kind
        self._directory = Path(options.directory)
        self._files: dict[int, int] = {}
        """Segment -> its size."""
        self._descriptor = -1
        self._lock_descriptor = -1
        self._number, self._size, self._seed = 0, 0, 0
        self._identity: dict[str, Any] = {}

    @classmethod
    def open(cls, options: JournalOptions, kind: str) -> "Journal":
        """Make the directory if it is missing, and lock it. Raises `RequestError`."""
        journal = cls(options, kind)
        _open.add(journal)
        try:
            journal._directory.mkdir(parents=True, exist_ok=True)
            journal._lock()
            for path in journal._directory.glob("segment-*.new"):
                path.unlink()
            journal._files = {number: path.stat().st_size for number, path in journal._paths().items()}
        except OSError as problem:
            journal.close()
            raise journal._unusable(problem) from problem
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def is_new(self) -> bool:
        """Whether it has no segment yet: call `begin`."""
        return not self._files

    @property
    def is_full(self) -> bool:
        """Whether the next segment should begin: call `begin`."""
        return self._size >= self.options.segment_bytes

    @property
    def segments(self) -> list[int]:
        """Numbers of the segments, in order; the last one is written to."""
        return sorted(self._files)

    def read(self) -> Iterator[tuple[Location, Head | bytes]]:
        """Read all segments of an existing journal, then be ready to append. Cuts off a torn tail.

        Raises `RequestError` for files that were altered, or that another program or version wrote.
        """
        numbers = self.segments
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise self._refuse(numbers[-1], f"segments are missing: there are {numbers}")
        last: tuple[int, int] | None = None
        for number in numbers:
            last = yield from self._read_segment(number, last, is_last=number == numbers[-1])

    def begin(self, identity: Mapping[str, Any], state: Any) -> None:
        """Begin the first or the next segment, whose head sums up the run so far in `state`."""
        earlier = (self._size, self._seed) if self._files else (0, 0)
        self._identity = dict(identity)
        head = Head(FORMAT, self._kind, self._identity, msgspec.Raw(_heads.encode(state)), *earlier)
        number = (self.segments[-1] if self._files else 0) + 1
        frame, checksum = encode_frame(_heads.encode(head), first_seed(number))
        path = self._path(number)
        with self._writing():
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1
            made = path.with_suffix(".new")
            self._descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            write_all(self._descriptor, MAGIC + frame)
            os.fsync(self._descriptor)
            made.rename(path)
            self._sync_directory()
        self._number, self._size, self._seed = number, len(MAGIC) + len(frame), checksum
        self._files[number] = self._size

    def append(self, payload: bytes) -> Location:
        """Append a record. It survives this process; `sync` makes it survive the machine."""
        if len(payload) > _MAX_BYTES:
            hint = "Return less of each sample: hidden states and the log-probs of a vocabulary are large."
            raise RequestError.for_field("journal", f"a record of {len(payload)} bytes", f"at most {_MAX_BYTES}", hint)
        frame, checksum = encode_frame(payload, self._seed)
        with self._writing():
            write_all(self._descriptor, frame)
        location = Location(self._number, self._size, len(frame))
        self._size, self._seed = self._size + len(frame), checksum
        self._files[self._number] = self._size
        return location

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        with self._writing():
            os.fsync(self._descriptor)

    def read_record(self, location: Location) -> bytes:
        """Read the payload of a record again. Raises `RequestError` if its segment can no longer be read."""
        try:
            with open(self._path(location.segment), "rb") as file:
                file.seek(location.start)
                frame = file.read(location.length)
        except OSError as problem:
            raise self._unusable(problem) from problem
        return frame[16:]

    def remove_before(self, number: int) -> None:
        """Remove the segments before this one, but for the newest `keep_segments` of them."""
        full = [each for each in self.segments[:-1] if each < number]
        for each in full[: max(len(self.segments) - 1 - self.options.keep_segments, 0)]:
            with suppress(OSError):
                self._path(each).unlink()
            del self._files[each]

    def close(self) -> None:
        """Release the journal. Calling it again is a no-op."""
        for descriptor in (self._descriptor, self._lock_descriptor):
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._descriptor = self._lock_descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _read_segment(
        self, number: int, earlier: tuple[int, int] | None, *, is_last: bool
    ) -> Generator[tuple[Location, Head | bytes], None, tuple[int, int]]:
        """Read one segment; `earlier`: size and last checksum of the one before. Returns its own."""
        path = self._path(number)
        try:
            data = path.read_bytes()
        except OSError as problem:
            raise self._unusable(problem) from problem
        end, seed = len(MAGIC), 0
        try:
            for frame in read_frames(data, number):
                location = Location(number, frame.start, end_of(frame) - frame.start)
                if not seed:
                    yield location, self._check_head(number, frame.payload, earlier)
                else:
                    yield location, frame.payload
                end, seed = end_of(frame), frame.checksum
        except (AlteredError, RecordError) as problem:
            raise self._refuse(number, str(problem)) from problem
        if not seed or (end < len(data) and not is_last):
            raise self._refuse(number, f"it is cut off behind byte {end}, and was whole before")
        if is_last:
            self._reopen(number, end, len(data), seed)
        return end, seed

    def _check_head(self, number: int, payload: bytes, earlier: tuple[int, int] | None) -> Head:
        head = _heads.decode(payload)
        if not 1 <= head.format <= FORMAT:
            raise self._refuse(number, f"its form is {head.format}, and this version reads up to {FORMAT}")
        if head.kind != self._kind:
            bound = f"the journal of a {self._kind}"
            raise RequestError.for_field("journal", str(self._directory), bound, f"It is that of a {head.kind}.")
        if earlier not in (None, (head.earlier_bytes, head.earlier_checksum)):
            raise self._refuse(number - 1, "it is not as it was when the next segment began")
        self._identity = head.identity
        return head

    def _reopen(self, number: int, end: int, size: int, seed: int) -> None:
        with self._writing():
            self._descriptor = os.open(self._path(number), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            if end < size:
                text = "%s: its last record was cut short by a crash (%d bytes) and is left out"
                logger.warning(text, self._path(number), size - end)
                os.ftruncate(self._descriptor, end)
        self._number, self._size, self._seed = number, end, seed
        self._files[number] = end

    def _lock(self) -> None:
        path = self._directory / _LOCK
        self._lock_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            hint = "Another collector writes to it, in this process or another: close that one, or give another one."
            raise RequestError.for_field("journal", str(self._directory), "without another writer", hint) from problem

    def _paths(self) -> dict[int, Path]:
        found = {path: _NAME.fullmatch(path.name) for path in self._directory.iterdir()}
        return {int(match[1]): path for path, match in found.items() if match}

    def _path(self, number: int) -> Path:
        return self._directory / f"segment-{number:06}.log"

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _writing(self) -> "_Writing":
        if self._lock_descriptor < 0:
            raise LifecycleError(f"The journal {self._directory} is closed: open it again by a new call.")
        return _Writing(self)

    def _refuse(self, number: int, reason: str) -> RequestError:
        hint = f"{self._path(number).name}: {reason}. Give another directory, or restore this one from a copy."
        return RequestError.for_field("journal", str(self._directory), "a journal as it was written", hint)

    def _unusable(self, problem: OSError) -> RequestError:
        return RequestError.for_field("journal", str(self._directory), "a directory to read and write", f"{problem}.")


class _Writing:
    """Closes the journal if a write fails: its last record may be cut short then."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, OSError):
            self._journal.close()
            raise self._journal._unusable(problem) from problem


def open_with(options: JournalOptions, kind: str, take: Callable[[Location, Head | bytes], None]) -> Journal:
    """Open a journal and pass all its records to `take`. Closes it if that raises."""
    journal = Journal.open(options, kind)
    try:
        if not journal.is_new:
            for location, record in journal.read():
                take(location, record)
    except BaseException:
        journal.close()
        raise
    return journal
