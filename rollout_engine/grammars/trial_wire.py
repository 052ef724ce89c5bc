"""Messages between a front end and its process for grammars on trial: each MessagePack, behind its length."""

import socket
import struct
from typing import Any, TypeVar

import msgspec

_Message = TypeVar("_Message", bound=msgspec.Struct)
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 30


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message to the process."""

    tokenizer: str
    """The content of `tokenizer.json`."""
    vocab_size: int
    eos_token_ids: list[int]
    seconds: float
    """Computing time that a trial may take."""


class Trial(msgspec.Struct, frozen=True, tag="trial"):
    """A grammar to compile."""

    text: str
    """`structured_outputs.text_of`."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to either."""

    problem: str
    """Empty where all went well."""


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises `OSError` where the other end is gone."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, kind: Any) -> Any:
    """Wait for a message of a kind. Raises `EOFError` and `OSError` where the other end is gone or too late."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_BYTES:
        raise OSError(f"a message of {length} bytes")
    return msgspec.msgpack.decode(_read(connection, length), type=kind)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
