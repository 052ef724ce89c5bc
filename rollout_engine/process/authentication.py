"""Authentication of peers: a core accepts the token in its directory, or over TCP keys that it has.

    client   PLAIN, with the token     ──>   zmq   ──> Authenticator.answer   in the core
             CURVE, with keys, on TCP  ──>
             messages                  ──>         ──> CoreSocket

Only the core's user may enter the directory. Over TCP all is encrypted, and each end proves that it has its key. zmq
itself does the handshake, and reads nothing else of a peer before the core has accepted it: peers without the token or
the keys take the memory of one command each, for half a minute at most.
"""

import hmac
import os
import secrets
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.process.keys import Keys, public_key
from sync.shared_files import check_private

_USER = b"client"
_ENDPOINT = "inproc://zeromq.zap.01"
"""Address at which zmq asks, by its protocol ZAP, about every peer."""
_MAX_TOKEN_BYTES = 255


def make_token(directory: str | Path) -> bytes:
    """Write a new token into a core's directory. Raises `OSError` if there is one."""
    token = secrets.token_hex(32).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(_path(directory), flags, 0o600), "wb") as file:
        file.write(token)
    return token


def read_token(directory: str | Path) -> bytes:
    """The token of the core in `directory`. Raises `EngineDeadError` if there is none, or others could write there."""
    try:
        check_private(Path(directory))
        with open(os.open(_path(directory), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read(_MAX_TOKEN_BYTES)
    except OSError as problem:
        why = f"No core lives in {directory} ({problem.strerror})"
        raise EngineDeadError(f"{why}: give the `address` of an AsyncLLM that runs on this machine.") from None


def show_token(socket: zmq.Socket[bytes], token: bytes) -> None:
    """Make a client's socket show a token. Call it before the socket is connected."""
    socket.plain_username, socket.plain_password = _USER, token


def show_keys(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Make a client's socket prove that it has its key, and demand the same of the core. Call it before it connects."""
    socket.curve_serverkey = public_key(keys.server)
    socket.curve_publickey, socket.curve_secretkey = public_key(keys.client), keys.client.encode()


class Authenticator:
    """Answers zmq's question whether a peer of a core's socket may connect. The thread of that socket calls it."""

    def __init__(self, context: zmq.Context[Any], token: bytes, keys: Keys | None = None) -> None:
        """`keys`: those of the clients that connect over TCP, if there are any."""
        self.socket = context.socket(zmq.REP)
        """Readable when `answer` has something to do."""
        self._credentials = {b"PLAIN": _USER + b"\0" + token}
        """Credentials that a peer has to show, by mechanism."""
        if keys is not None:
            self._credentials[b"CURVE"] = z85.decode(public_key(keys.client))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let only peers with the token connect at endpoints that a socket of the same context binds from now on."""
        socket.plain_server = True

    def guard_tcp(self, socket: zmq.Socket[bytes], keys: Keys) -> None:
        """Let only peers with the client's key connect at endpoints bound from now on; others keep their rule."""
        socket.curve_server, socket.curve_secretkey = True, keys.server.encode()

    def answer(self) -> None:
        """Answer all questions that have arrived."""
        while self.socket.poll(0):
            version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
            expected = self._credentials.get(mechanism)
            known = expected is not None and hmac.compare_digest(b"\0".join(credentials), expected)
            status, text = (b"200", b"welcome") if known else (b"400", b"another token or key")
            self.socket.send_multipart([version, number, status, text, b"", b""])

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()


def _path(directory: str | Path) -> Path:
    return Path(directory) / "token"
