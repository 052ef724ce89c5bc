"""The socket between a core's process and its parent: both ends in one file. Each side is told when the other ends.

parent   CoreProcess    ── CoreSettings ──────> child   core_main.serve
         wait_ready     <── Ready | Failure ──
         the socket stays open; the system closes it when either process ends
"""

import os
import socket
import time
import weakref

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.process.keys import Keys
from rollout_engine.process.wire import Failure, Ready
from sync.described_types import describe_types

_MAX_MESSAGE_BYTES = 1 << 20


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the parent sends to the core's process."""

    protocol: int
    config: EngineConfig
    heartbeat_seconds: float
    max_backlog_bytes: int
    log_level: int
    import_path: list[str]
    """`sys.path` of the parent, where the user's modules are found."""
    listen: str = ""
    """TCP address at which the core takes clients that have the keys; "": none."""
    keys: Keys | None = None


describe_types(CoreSettings)


class Lifeline:
    """One end of the socket between a core's process and its parent."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.set_inheritable(False)
        _HERE.add(self)

    def close(self) -> None:
        """Close this end, which tells the other one."""
        self.socket.close()

    def write(self, message: CoreSettings | Ready | Failure) -> None:
        """Send a message. Raises `OSError` if the other end is gone."""
        body = msgspec.msgpack.encode(message)
        self.socket.sendall(len(body).to_bytes(4, "big") + body)

    def read(self, kind: type, timeout: float | None) -> object:
        """Wait for the next message.

        Raises `EOFError` if the other end is gone, `TimeoutError` after `timeout` seconds, `msgspec.DecodeError` for
        bytes that are no message.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        length = int.from_bytes(self._read_exactly(4, deadline), "big")
        if length > _MAX_MESSAGE_BYTES:
            raise EOFError(f"a message of {length} bytes")
        body = self._read_exactly(length, deadline)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UnicodeDecodeError as problem:
            raise msgspec.DecodeError(str(problem)) from None

    def _read_exactly(self, count: int, deadline: float | None) -> bytes:
        data = b""
        while len(data) < count:
            self.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError("the other end is gone")
            data += part
        return data


_HERE: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def _close_all() -> None:
    """Close a forked child's copies, which would keep cores alive that its parent has left."""
    for lifeline in list(_HERE):
        lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
