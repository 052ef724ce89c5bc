"""Who may connect to a core: a peer that knows the token in the core's directory, which only the core's user may enter.

    client   PLAIN, with the token ──>   zmq   ──> Authenticator.answer   in the core
             messages             ──>          ──> CoreSocket

zmq itself does the handshake, and reads nothing else of a peer before the core has accepted it: peers without the token
take the memory of one command each, for half a minute at most.
"""

import hmac
import os
import secrets
from pathlib import Path
from typing import Any

import zmq

from rollout_engine.errors import EngineDeadError
from sync.shared_files import check_private

_USER = b"client"
_ENDPOINT = "inproc://zeromq.zap.01"
"""Where zmq asks, by its protocol ZAP, about every peer."""
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


class Authenticator:
    """Answers zmq's question whether a peer of a core's socket may connect. The thread of that socket calls it."""

    def __init__(self, context: zmq.Context[Any], token: bytes) -> None:
        self.socket = context.socket(zmq.REP)
        """Readable when `answer` has something to do."""
        self._token = token
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let only peers with the token connect to a socket of the same context. Call it before the socket is bound."""
        socket.plain_server = True

    def answer(self) -> None:
        """Answer all questions that have come."""
        while self.socket.poll(0):
            version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
            known = mechanism == b"PLAIN" and hmac.compare_digest(b"\0".join(credentials), _USER + b"\0" + self._token)
            status, text = (b"200", b"welcome") if known else (b"400", b"another token")
            self.socket.send_multipart([version, number, status, text, b"", b""])

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()


def _path(directory: str | Path) -> Path:
    return Path(directory) / "token"
