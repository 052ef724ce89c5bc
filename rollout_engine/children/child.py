"""The handle of a child process: how the parent starts it, speaks to it, watches it and ends it.

    Child(start)   the child inherits its ends of the channels, and leads a process group
    ask            a message and its answer, as long as the child lives
    end            closes the channels, waits, and kills the group if that takes long

A child ends when its channel is closed. When this process ends without having ended it, the system kills the child
(`rollout_engine.children.process`), and the guard kills the child's children (`rollout_engine.children.guard`).
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rollout_engine.children.channel import MAX_BYTES, Channel
from rollout_engine.children.guard import GUARD
from sync.owner_process import OwnerProcess

_LOOK_SECONDS = 0.5
"""How often to look whether a child lives that does not answer. A process that it forks may hold its channel."""


class Child:
    """A child of this process. A process forked from this one can neither speak to it nor end it.

    Args:
        start: starts it, given the descriptors of its ends of the channels, which it inherits: `start_module`.
        num_channels: sockets between the two.
        max_bytes: bytes of the longest message that is received.
        end_seconds: time that it has to end before it is killed.

    Raises the errors of `start`.
    """

    def __init__(
        self,
        start: Callable[[Sequence[int]], "subprocess.Popen[bytes]"],
        *,
        num_channels: int = 1,
        max_bytes: int = MAX_BYTES,
        end_seconds: float = 5.0,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(num_channels)]
        try:
            self._process = start([theirs.fileno() for _, theirs in pairs])
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.channels = [Channel(ours, max_bytes) for ours, _ in pairs]
        self.owner, self._end_seconds = OwnerProcess(), end_seconds
        self._is_over = False
        GUARD.add_group(self.pid)

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether it is a child of the current process, and not of one that this one was forked from."""
        return self.owner.is_current

    @property
    def channel(self) -> Channel:
        """The first channel."""
        return self.channels[0]

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.wait(0.0) is None

    def ask(self, message: Any, kind: Any, timeout: float | None = None) -> Any:
        """Send a message, and wait for the answer of type `kind`. Raises as `Channel.send` and `receive` do."""
        self.channel.send(message, timeout)
        return self.receive(kind, timeout)

    def receive(self, kind: Any, timeout: float | None = None) -> Any:
        """Wait for its next message, of type `kind`, as long as it lives.

        Raises `EOFError` or `OSError` if it has ended, `TimeoutError` after `timeout` seconds, and
        `msgspec.DecodeError` for bytes that are no message.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        is_alive = True
        while True:
            left = _LOOK_SECONDS if deadline is None else min(deadline - time.monotonic(), _LOOK_SECONDS)
            try:
                return self.channel.receive(kind, max(left, 0.001))
            except TimeoutError:
                if not is_alive:
                    raise EOFError("the other end is gone") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            is_alive = self.is_alive  # it may have answered just before its end: receive once more

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def wait(self, seconds: float | None) -> int | None:
        """Wait for its end; None: without a limit. Returns its status as `subprocess` does; None: it still runs.

        The rest of its process group is killed when it has ended. In a forked process it returns None at once.
        """
        if not self.is_ours:
            return None
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if not self._is_over:
            self._is_over = True
            self._kill_group()  # now: later another process may have its number
            GUARD.drop_group(self.pid)
        return status

    def kill(self) -> None:
        """Kill it and its process group, on any thread; no-op if it has ended, and in a forked process."""
        if self.is_ours and self.is_alive:
            self._kill_group()

    def end(self, *, kill: bool = False) -> int | None:
        """Close the channels and wait for its end; kill it if that takes long, or at once. Returns its status.

        In a forked process it does nothing and returns None.
        """
        if not self.is_ours:
            return None
        if kill:
            self.kill()
        for channel in self.channels:
            channel.close()
        if self.wait(self._end_seconds) is None:
            self.kill()
        return self.wait(None)

    def _kill_group(self) -> None:
        """Kill it, and those of its children that have not left its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
