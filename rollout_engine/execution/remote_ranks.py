"""Ranks on other machines: their processes connect to rank 0 over TCP, four sockets each.

    rank ── token, its number, the socket's use ──> rank 0, which closes connections with another token

The later messages on the sockets are `rank_wire`'s, as between processes of one machine. A machine that vanishes is
noticed by TCP's keepalive.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.children.channel import Channel
from rollout_engine.execution.rank_launcher import Rank, RankLauncher
from rollout_engine.execution.rank_wire import MAX_BYTES, NUM_SOCKETS, RankSettings
from rollout_engine.model.ranks.group_meeting import GroupMeeting

TOKEN_VARIABLE = "ROLLOUT_ENGINE_RANK_TOKEN"
"""Variable by which a rank's process has the token."""
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sHB")
"""Token, rank, place of the socket among `life, steps, calls, pulse`."""
_CONNECT_SECONDS = 120.0
"""How long a process that has begun may take to import this package and connect."""
_HELLO_SECONDS = 2.0
"""Seconds that a connection may take to identify itself."""
_MAX_WAITING = 256
"""Connections that may take so long at the same time."""
_POLL_SECONDS = 0.5
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_LOST_MILLISECONDS = 30_000
"""After so long without an answer a machine counts as gone."""


class Rendezvous(NamedTuple):
    """Rank 0's address, and the token that it expects."""

    host: str
    port: int
    token: str
    """Hexadecimal, a secret of this engine's ranks."""


class RemoteProcess(Protocol):
    """A rank's process, held by its starter."""

    name: str
    """Process and machine, for messages."""

    def has_ended(self) -> bool:
        """Whether it has ended, or cannot be reached."""
        ...

    def how_it_ended(self) -> str:
        """Wait for its end: "with status 1"."""
        ...

    def end(self) -> None:
        """Wait for its end, and kill it if that takes long. Calling it again is a no-op."""
        ...


class RemoteRank(Rank):
    """A rank that has connected."""

    def __init__(self, settings: RankSettings, ends: Sequence[socket.socket], process: RemoteProcess) -> None:
        self.name, self.process = f"rank {settings.rank} ({process.name})", process
        super().__init__(settings, *(Channel(end, MAX_BYTES) for end in ends))

    def how_it_ended(self) -> str:
        return self.process.how_it_ended()

    def _end_process(self) -> None:
        self.process.end()


class RemoteLauncher(RankLauncher):
    """Waits for ranks to connect. A subclass starts their processes."""

    is_remote = True

    def __init__(self, host: str, num_ranks: int) -> None:
        """`host`: an address of this machine that the others reach."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._door = Door(socket.create_server((host, 0), family=family))
        self._place = Rendezvous(host, self._door.port, secrets.token_hex(_TOKEN_BYTES))
        self._meeting_point, self.rendezvous = (_free_address(host, family) for _ in range(2))
        self.meeting = GroupMeeting(self._meeting_point, 0, num_ranks)

    @abstractmethod
    def begin(self, settings: RankSettings, place: Rendezvous) -> RemoteProcess:
        """Start the process of a rank, which connects to `place`. Raises `ConfigError` if that is not possible."""

    def start(self, settings: Sequence[RankSettings]) -> Iterator[Rank]:
        begun: dict[int, RemoteProcess] = {}
        ends: dict[int, dict[int, socket.socket]] = {each.rank: {} for each in settings}
        try:
            for each in settings:
                begun[each.rank] = self.begin(each, self._place)
            deadline = time.monotonic() + _CONNECT_SECONDS
            for each in settings:
                while len(ends[each.rank]) < NUM_SOCKETS:
                    self._require_coming(each.rank, begun[each.rank], deadline)
                    self._accept(ends)
                mine = msgspec.structs.replace(each, meeting=self._meeting_point, rendezvous=self.rendezvous)
                sockets = ends.pop(each.rank)
                yield RemoteRank(mine, [sockets[n] for n in range(NUM_SOCKETS)], begun.pop(each.rank))
        finally:
            for sockets in ends.values():
                for end in sockets.values():
                    end.close()
            for process in begun.values():
                process.end()

    def close(self) -> None:
        self._door.close()
        self.meeting.break_()

    def _accept(self, ends: dict[int, dict[int, socket.socket]]) -> None:
        """Take the connections that soon identify their rank, and close those of strangers."""
        for end, hello in self._door.arrivals(_POLL_SECONDS):
            token, rank, place = _HELLO.unpack(hello)
            is_ours = hmac.compare_digest(token, bytes.fromhex(self._place.token))
            if not is_ours or place in (known := ends.get(rank, {})) or rank not in ends or place >= NUM_SOCKETS:
                end.close()
            else:
                known[place] = _kept_alive(end)

    def _require_coming(self, rank: int, process: RemoteProcess, deadline: float) -> None:
        if process.has_ended():
            raise EngineDeadError(f"rank {rank} ({process.name}) has ended {process.how_it_ended()}, unconnected.")
        if time.monotonic() > deadline:
            raise ConfigError(
                f"rank {rank} ({process.name}) has not connected to {self._place.host}:{self._place.port} within "
                f"{_CONNECT_SECONDS:g} s. Let the machines of the ranks reach one another over TCP, on any port."
            )


class Door:
    """A listening socket, and connections that have not said all of their hello: none keeps another one waiting."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        self._waiting: dict[int, tuple[socket.socket, bytearray, float]] = {}
        """Descriptor -> connection, the bytes of its hello so far, and the deadline for its rest; oldest first."""

    def arrivals(self, seconds: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Wait up to `seconds` for something to happen; yield the connections whose hello is whole."""
        poller = select.poll()
        for descriptor in (self._listener.fileno(), *self._waiting):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(int(1000 * seconds)):
            if descriptor == self._listener.fileno():
                self._accept()
            elif (whole := self._read(descriptor)) is not None:
                yield whole
        now = time.monotonic()
        for descriptor in [each for each, (_, _, deadline) in self._waiting.items() if now > deadline]:
            self._waiting.pop(descriptor)[0].close()

    def close(self) -> None:
        """Close the socket, and all connections that wait."""
        self._listener.close()
        for end, _, _ in self._waiting.values():
            end.close()
        self._waiting.clear()

    def _accept(self) -> None:
        """Take one connection. Of too many that wait, the oldest is closed."""
        try:
            end, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no descriptor for it now
            return
        end.setblocking(False)
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.pop(next(iter(self._waiting)))[0].close()
        self._waiting[end.fileno()] = end, bytearray(), time.monotonic() + _HELLO_SECONDS

    def _read(self, descriptor: int) -> tuple[socket.socket, bytes] | None:
        """Read from a connection. Returns it once all of its hello has arrived."""
        found = self._waiting.get(descriptor)
        if found is None:  # the oldest of too many
            return None
        end, hello, _ = found
        try:
            received = end.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        hello += received
        if received and len(hello) < _HELLO.size:
            return None
        del self._waiting[descriptor]
        if not received:
            end.close()
            return None
        return end, bytes(hello)


class Channels(NamedTuple):
    """A rank's four ends."""

    life: Channel
    steps: Channel
    calls: Channel
    pulse: Channel


def connect(place: Rendezvous, rank: int) -> Channels:
    """Connect to rank 0, as this rank. Raises `OSError` if it cannot be reached."""
    ends = []
    for number in range(NUM_SOCKETS):
        end = socket.create_connection((place.host, place.port), _CONNECT_SECONDS)
        end.sendall(_HELLO.pack(bytes.fromhex(place.token), rank, number))
        ends.append(Channel(_kept_alive(end), MAX_BYTES))
    return Channels(*ends)


def arguments_of(place: Rendezvous, rank: int, num_ranks: int) -> list[str]:
    """Arguments of `rank_main` for a rank that connects to `place`. Its environment has the token."""
    return ["--connect", place.host, str(place.port), str(rank), str(num_ranks)]


def place_of(host: str, port: str) -> Rendezvous:
    """The place of these arguments, with this process's token, which later children do not see."""
    return Rendezvous(host, int(port), os.environ.pop(TOKEN_VARIABLE))


def _kept_alive(end: socket.socket) -> socket.socket:
    """The socket, which blocks, sends small messages at once, and fails once the other machine is gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEPALIVE, "TCP_USER_TIMEOUT": _LOST_MILLISECONDS}.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end


def _free_address(host: str, family: int) -> str:
    """An address "tcp://host:port" at which no socket listens now."""
    with socket.create_server((host, 0), family=family) as probe:
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{probe.getsockname()[1]}"
