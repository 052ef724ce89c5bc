"""TCP addresses of cores: the one on which it listens, and the one for clients. None is used without keys."""

import re
import socket
from typing import Any, NamedTuple

import zmq

from rollout_engine.base.errors import ConfigError

SCHEME = "tcp://"
_ADDRESS = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^\s/:\[\]]+):(?P<port>\d{1,5}|\*)")
_EVERY = ("*", "0.0.0.0", "[::]")
"""Hosts that mean every address of a machine: a core may listen there, but no client can connect to it."""

_LISTENER = {
    zmq.HANDSHAKE_IVL: 5_000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 60_000,
}
"""Strangers have 5 s for the handshake. A client whose machine is cut off counts as gone after half a minute without an
answer of the machine, or after a minute in which it takes nothing."""


class TcpAddress(NamedTuple):
    """A host and a port; port 0: any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str, *, to_listen: bool = False) -> "TcpAddress":
        """Parse "tcp://HOST:PORT". Raises `ConfigError` naming `field`."""
        found = _ADDRESS.fullmatch(text)
        port = 0 if found is None or found["port"] == "*" else int(found["port"])
        if found is None or port > 65_535:
            raise ConfigError(
                f"{field}={text[:80]!r} is no TCP address: write tcp://HOST:PORT, as tcp://10.0.0.7:5555."
            )
        if not to_listen and (port == 0 or found["host"] in _EVERY):
            what = "a client needs the name or number of one machine, and a port, as the core has printed them"
            raise ConfigError(f"{field}={text[:80]!r} is where a core listens: {what}.")
        return cls(found["host"], port)

    def resolve(self, field: str) -> str:
        """The address by numbers, as zmq takes it. Raises `ConfigError` for an unknown host."""
        if self.host == "*":
            return f"{SCHEME}0.0.0.0:{self.port}"
        try:
            found = socket.getaddrinfo(self.host.strip("[]"), self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            raise ConfigError(f"{field}: the host {self.host[:80]!r} is unknown here ({problem}).") from None
        family, *_, (number, *_) = found[0]
        return f"{SCHEME}[{number}]:{self.port}" if family == socket.AF_INET6 else f"{SCHEME}{number}:{self.port}"


def is_tcp(address: str) -> bool:
    """Whether an address is a TCP one, well-formed or not."""
    return address.startswith(SCHEME)


def allow_ipv6(socket: zmq.Socket[Any], address: str) -> None:
    """Let a socket use an address of numbers, of either family."""
    socket.setsockopt(zmq.IPV6, int("[" in address))


def listen_on(socket: zmq.Socket[Any], text: str) -> str:
    """Bind a core's socket to a TCP address. Returns the address with its port. Raises `ConfigError`."""
    address = TcpAddress.parse(text, "listen", to_listen=True).resolve("listen")
    allow_ipv6(socket, address)
    for option, value in _LISTENER.items():
        socket.setsockopt(option, value)
    try:
        socket.bind(address)
    except zmq.ZMQError as problem:
        advice = "give an address of this machine, and a port that is free, or 0 for any"
        raise ConfigError(f"listen={text!r} cannot be used ({problem.strerror}): {advice}.") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def require_keys(address: str, keys: object, field: str) -> None:
    """Raise `ConfigError` for a TCP address without keys: nothing goes over TCP unencrypted, not even on loopback."""
    if is_tcp(address) and keys is None:
        what = "nobody connects over TCP without keys, not even on one machine"
        advice = "give key_file, the same file on both ends; `rollout-engine core --key-file` makes it"
        raise ConfigError(f"{field}={address[:80]!r}: {what}: {advice}.")
