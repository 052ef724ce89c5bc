"""Watches a process that reports its progress, and says what became of it: a figure, or how it failed.

    watch ──starts──> python -m tests.faults.parts NAME ...
          <──pipe──── {"done": 120}   {"done": 240}   ...   {"figure": {...}}

A process that is killed, crashes, raises, makes no progress or takes too much memory leaves a failure and its log.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

Figure = dict[str, Any]

_LOOK_SECONDS = 0.5
_NOTE_SECONDS = 60.0
"""Between two records of a process that goes on."""
_DUMP_SECONDS = 5.0
"""How long a process that hangs may take to write its stacks."""
_LEAST_FREE = 0.03
"""Share of the machine's memory that must stay free: below it the system would kill somebody, without a word."""


class Limits(NamedTuple):
    """Time and memory that a process may take before it is ended."""

    hang_seconds: float
    """Without progress."""
    memory_gib: float
    """Resident, with its children."""


def watch(
    command: list[str],
    log: Path,
    limits: Limits,
    note: Callable[[Figure], object],
    environment: Mapping[str, str] | None = None,
) -> Figure:
    """Run a command, which gets the descriptor for its reports as the last argument; its output goes to `log`.

    `environment`: its variables; None: this process's. Returns its figure, or one with "failure", the count reached and
    the most memory it held. `note` is called with what is known at the start, every minute, and when this process is
    interrupted or told to end.
    """
    with log.open("wb") as output, _started(command, output, environment) as (process, pipe):
        watched = _Watched(process, pipe, limits)
        note(watched.figure("it is running, or whoever watched it was killed"))
        try:
            with _signals_raise():
                return watched.run(note)
        except BaseException as problem:
            note(watched.figure(f"the run was ended from outside: {problem!r}"))
            raise


class _Watched:
    def __init__(self, process: "subprocess.Popen[bytes]", pipe: int, limits: Limits) -> None:
        self._process, self._pipe, self._limits = process, pipe, limits
        self._buffer, self._result = b"", None
        self._done = self._most_bytes = 0
        self._start = self._moved = self._noted = self._looked = time.monotonic()
        self._num_oom_kills = _num_oom_kills()

    def run(self, note: Callable[[Figure], object]) -> Figure:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while self._read() if selector.select(_LOOK_SECONDS) else True:
                if (problem := self._problem()) is not None:
                    return self._given_up(problem)
                if time.monotonic() - self._noted > _NOTE_SECONDS:
                    self._noted = time.monotonic()
                    note(self.figure("it is running, or whoever watched it was killed"))
        code = self._process.wait()
        if code == 0 and self._result is not None:
            return self._result | self._cost()
        return self.figure(self._why(code))

    def figure(self, failure: str) -> Figure:
        """Figure of a process that gave none itself."""
        return {"failure": failure, "done": self._done} | self._cost()

    def _cost(self) -> Figure:
        gib = round(self._most_bytes / 2**30, 2)
        return {"most_memory_gib": gib, "seconds": round(time.monotonic() - self._start, 1)}

    def _read(self) -> bool:
        """Take reports in. False: no more will come."""
        data = os.read(self._pipe, 1 << 20)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._result = message.get("figure", self._result)
            if message.get("done", self._done) != self._done:
                self._done, self._moved = message["done"], time.monotonic()
        return bool(data)

    def _problem(self) -> str | None:
        now = time.monotonic()
        if now - self._moved > self._limits.hang_seconds:
            return f"it hangs: no progress for {now - self._moved:.0f} s"
        if now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        held = _resident(self._process.pid)
        self._most_bytes = max(self._most_bytes, held)
        memory = psutil.virtual_memory()
        if held > self._limits.memory_gib * 2**30:
            return f"it holds {held / 2**30:.2f} GiB, more than {self._limits.memory_gib:g}"
        if memory.available < _LEAST_FREE * memory.total:
            return f"the machine has {memory.available / 2**30:.2f} GiB left, while it holds {held / 2**30:.2f} GiB"
        return None

    def _given_up(self, problem: str) -> Figure:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DUMP_SECONDS)
        return self.figure(f"{problem}; it was ended, its stacks are in the log")

    def _why(self, code: int) -> str:
        if code >= 0:
            return f"it exited with status {code}, without a figure" if code == 0 else f"it raised: status {code}"
        num_kills = _num_oom_kills() - self._num_oom_kills
        memory = f"; the system killed {num_kills} processes for memory meanwhile" if num_kills else ""
        return f"it was killed by {signal.Signals(-code).name}{memory}"


@contextmanager
def _started(
    command: list[str], output: Any, environment: Mapping[str, str] | None
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    reading, writing = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [*command, str(writing)],
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env=environment,
            )
        finally:
            os.close(writing)
        try:
            yield process, reading
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(reading)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Have SIGTERM and SIGHUP, such as when a session ends, raise `SystemExit`."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(f"{signal.Signals(number).name} came")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resident(pid: int) -> int:
    """Bytes in memory of a process and its children, those that they share counted in each."""
    total = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def _num_oom_kills() -> int:
    """Processes that the system has killed for memory since it was started; 0 where it does not say."""
    with suppress(OSError):
        rows = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(rows.get("oom_kill", 0))
    return 0
