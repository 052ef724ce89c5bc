"""A program of the user's as a child: started, its output captured, killed with all that it has started.

    owner ── stdin ──> supervisor (`rollout_engine.children.supervisor`) ── starts, kills ──> program, its descendants
      ^ <── status ──────┘                                                                       │
      └───────────────── stdout, stderr ─────────────────────────────────────────────────────────┘

`kill` and the owner's end close the supervisor's input, upon which it kills every descendant of the program. If the
owner is killed and the supervisor cannot act, the guard (`rollout_engine.children.guard`) kills the program's group.
"""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from rollout_engine.base.errors import RetryableError
from rollout_engine.children.guard import GUARD
from rollout_engine.children.process import start_process

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_END_SECONDS = 10.0
"""Seconds that the supervisor has to kill the program before it is killed itself."""
_LOOK_SECONDS = 0.5
"""How often to look whether another thread has killed it, if it writes nothing."""
_CHUNK_BYTES = 65_536


class ProgramEnd(NamedTuple):
    """How a program has ended."""

    status: int | None
    """Exit status; -N: ended by signal N; None: it did not start, or its supervisor was killed."""
    output: str
    """The last bytes of its standard output, as UTF-8 with replacements."""
    errors: str
    """Those of its standard error."""
    num_bytes: int
    """Bytes that it wrote to both."""
    is_late: bool
    """Whether it was killed because its time was up."""
    problem: str
    """Why it did not start; "": it did."""


class Program:
    """A running program. One thread calls `wait`; any thread may call `kill`."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], directory: str, max_output_bytes: int
    ) -> None:
        """Start a program with these variables alone, in this directory.

        `max_output_bytes`: bytes of each of its outputs that are kept, the last ones. Raises `RetryableError` if the
        system starts no process.
        """
        status, to_status = os.pipe()
        words = [str(os.getpid()), str(to_status), environment.get("LC_CTYPE", ""), *command]
        try:
            self._supervisor = start_process(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[to_status],
                env=dict(environment),
                cwd=directory,
                start_new_session=True,  # Ctrl-C is the owner's to handle
            )
        except OSError as problem:
            os.close(status)
            what = f"A process for '{command[0]}' cannot start ({problem})"
            raise RetryableError(f"{what}: end processes, or allow more, and call again.") from problem
        finally:
            os.close(to_status)
        self._status = os.fdopen(status, "rb", buffering=0)
        self._output, self._errors = _Tail(max_output_bytes), _Tail(max_output_bytes)
        self._lines = _Tail(_CHUNK_BYTES)
        self._group = 0
        """Process id and group of the program; 0 until it is reported, and after its end."""
        self._lock, self._kill_time = threading.Lock(), float("inf")

    def wait(self, seconds: float | None = None) -> ProgramEnd:
        """Read its output until it has ended, and kill it after `seconds`. Returns how it ended."""
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        is_late = False
        try:
            with selectors.DefaultSelector() as selector:
                for file, tail in self._files():
                    os.set_blocking(file.fileno(), False)
                    selector.register(file, selectors.EVENT_READ, tail)
                while selector.get_map() and time.monotonic() < self._kill_time + _END_SECONDS:
                    left = deadline - time.monotonic()
                    if left <= 0 and not is_late:
                        is_late = self.kill()
                    self._read(selector, min(left, _LOOK_SECONDS) if left > 0 else _LOOK_SECONDS)
        finally:
            self._end()
        return self._describe_end(is_late)

    def kill(self) -> bool:
        """Kill the program and all its descendants; `wait` then returns soon. Returns False from the second call on."""
        with self._lock:
            is_first = self._kill_time == float("inf")
            if is_first:
                self._kill_time = time.monotonic()
                assert self._supervisor.stdin is not None
                self._supervisor.stdin.close()
        return is_first

    def _files(self) -> list[tuple[IO[bytes], "_Tail"]]:
        assert self._supervisor.stdout is not None and self._supervisor.stderr is not None
        return [
            (self._supervisor.stdout, self._output),
            (self._supervisor.stderr, self._errors),
            (self._status, self._lines),
        ]

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> None:
        """Wait for output, and keep it."""
        for key, _ in selector.select(seconds):
            file: Any = key.fileobj
            data = file.read(_CHUNK_BYTES)
            if data == b"":
                selector.unregister(file)
                if file is self._status and self._reported("ended") is None:
                    self._kill_groups()  # the supervisor has not done it
            elif data:
                key.data.add(data)
                if file is self._status and not self._group:
                    self._guard()

    def _guard(self) -> None:
        """Have the guard kill the program's group if this process is killed, once the group is known."""
        started = self._reported("started")
        if started is not None and self._reported("ended") is None:
            GUARD.add_group(int(started))
            self._group = int(started)

    def _reported(self, word: str) -> str | None:
        """The rest of the supervisor's line that begins with a word; None: there is none."""
        lines = self._lines.text().splitlines()
        return next((line.partition(" ")[2] for line in lines if line.startswith(f"{word} ")), None)

    def _end(self) -> None:
        """Release the supervisor, which has ended, or is killed along with the program's group."""
        self.kill()
        try:
            self._supervisor.wait(max(0.0, self._kill_time + _END_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill_groups()
            self._supervisor.wait()
        if self._group:
            GUARD.drop_group(self._group)
        for file, _ in self._files():
            file.close()

    def _kill_groups(self) -> None:
        """Kill the supervisor, and the program with those that have not left its group."""
        self.kill()
        for group in {self._group, self._supervisor.pid} - {0}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def _describe_end(self, is_late: bool) -> ProgramEnd:
        ended, failed = self._reported("ended"), self._reported("failed")
        num_bytes = self._output.num_bytes + self._errors.num_bytes
        status = None if ended is None else int(ended)
        return ProgramEnd(status, self._output.text(), self._errors.text(), num_bytes, is_late, failed or "")


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._kept, self._num_kept = max_bytes, deque[bytes](), 0
        self.num_bytes = 0
        """Bytes of the stream so far."""

    def add(self, data: bytes) -> None:
        """Append to the stream."""
        self._kept.append(data)
        self.num_bytes += len(data)
        self._num_kept += len(data)
        while self._num_kept - len(self._kept[0]) >= self._max_bytes:
            self._num_kept -= len(self._kept.popleft())

    def text(self) -> str:
        """The last `max_bytes` bytes as text."""
        kept = b"".join(self._kept)
        return kept[max(0, len(kept) - self._max_bytes) :].decode(errors="replace")
