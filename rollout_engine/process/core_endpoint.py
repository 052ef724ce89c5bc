"""A core's endpoint, and how a client connects to it: by the core's directory on this machine, or on TCP with keys."""

import time
from typing import Any, Protocol

import zmq

from rollout_engine.base.errors import ConfigError
from rollout_engine.process import descriptors
from rollout_engine.process.authentication import read_token, show_keys, show_token
from rollout_engine.process.core_clock import CoreClock, SharedClock
from rollout_engine.process.core_launcher import address_in
from rollout_engine.process.core_link import CoreLink
from rollout_engine.process.keys import Keys
from rollout_engine.process.pulse import PulseReader, RemotePulse, SignsOfLife
from rollout_engine.process.tcp_address import TcpAddress, allow_ipv6, is_tcp, require_keys

_LOST = "its connection is lost"


class CoreEndpoint(Protocol):
    """A place at which a core takes clients."""

    address: str
    """As users write it."""
    clock: CoreClock
    """The core's clock."""

    def connect(self) -> CoreLink:
        """Connect. Raises `EngineDeadError`, `RetryableError`, `ConfigError`."""
        ...

    def signs_of_life(self, link: CoreLink, hang_seconds: float) -> SignsOfLife:
        """Begin to look for signs of life of the core."""
        ...


class LocalEndpoint:
    """A core on this machine; its directory is the address."""

    def __init__(self, directory: str) -> None:
        self.address = directory
        self.clock: CoreClock = SharedClock()

    def connect(self) -> CoreLink:
        """Take a place at the core and connect."""
        token, place = read_token(self.address), descriptors.take_place(self.address)
        losses: dict[int, str] = {
            zmq.EVENT_DISCONNECTED: _LOST,
            zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it did not take the token in its directory, which is another core's now",
        }

        def leave() -> None:
            if place is not None:
                descriptors.leave_place(place)

        return CoreLink(address_in(self.address), lambda socket: show_token(socket, token), losses, leave)

    def signs_of_life(self, link: CoreLink, hang_seconds: float) -> SignsOfLife:
        """Read them in the core's directory."""
        return PulseReader(self.address, time.monotonic())


class TcpEndpoint:
    """A core at a TCP address, on this machine or another one."""

    def __init__(self, address: str, keys: Keys) -> None:
        """Raises `ConfigError` for a malformed address, and for an unknown host."""
        self.address = address
        self.clock = CoreClock()
        self._keys = keys
        self._at = TcpAddress.parse(address, "address").resolve("address")

    def connect(self) -> CoreLink:
        """Connect; the process that answers has to prove that it has the core's key."""
        return CoreLink(self._at, self._introduce, _TCP_LOSSES)

    def signs_of_life(self, link: CoreLink, hang_seconds: float) -> SignsOfLife:
        """Ask for them over a connection of their own."""
        return RemotePulse(link.new_socket(self._introduce), self._at, hang_seconds, time.monotonic())

    def _introduce(self, socket: zmq.Socket[Any]) -> None:
        allow_ipv6(socket, self._at)
        show_keys(socket, self._keys)


_NO_CORE = "is no core that listens with keys"
_OTHER_KEY = "it has another key than this client's key_file says (copy the file that was given to the core)"
_TCP_LOSSES: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: _LOST,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know the client's key. Copy the key_file that was given to the core",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: f"what answers there {_NO_CORE}",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: f"it ended the handshake: {_OTHER_KEY}, or {_NO_CORE}",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
}


def endpoint(address: str, keys: Keys | None) -> CoreEndpoint:
    """The endpoint with this address, a core's directory or "tcp://HOST:PORT".

    Raises `ConfigError` for a TCP address without keys, and for a directory with keys.
    """
    if not is_tcp(address):
        if keys is not None:
            raise ConfigError(f"key_file is for a core on TCP: {address[:80]!r} is a directory, connect without it.")
        return LocalEndpoint(address)
    require_keys(address, keys, "address")
    assert keys is not None, "required"
    return TcpEndpoint(address, keys)
