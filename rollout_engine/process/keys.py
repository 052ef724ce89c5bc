"""The keys of a core that listens on TCP, and the file in which a user carries them to another machine.

One file serves both ends: it is made on the core's machine and copied to the client's, as a token would be. A user who
has it may use the core, and could stand for it; so it belongs to one user, and others have no rights to it.
"""

import os
import stat
from pathlib import Path
from typing import Self

import msgspec
import zmq

from rollout_engine.base.errors import ConfigError
from sync.own_files import OTHERS, AnyPath, opened_file

_MAX_FILE_BYTES = 4096
_KEY_CHARS = 40
"""Characters of a key as zmq writes it (Z85)."""


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The secret CURVE keys of a core and of its clients, as zmq writes them; the public ones follow from them."""

    server: str
    client: str

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            try:
                public_key(getattr(self, name))
            except (ValueError, zmq.ZMQError):
                raise ValueError(f"{name} is no key of {_KEY_CHARS} characters") from None

    @classmethod
    def make(cls) -> Self:
        """Draw new keys."""
        (_, server), (_, client) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(server=server.decode(), client=client.decode())

    @classmethod
    def write(cls, path: AnyPath) -> Self:
        """Draw new keys and write them to a new file, mode 0600. Raises `ConfigError`, also if the file exists."""
        keys, flags = cls.make(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(keys) + b"\n")
        except OSError as problem:
            raise ConfigError(f"key_file={str(path)!r} cannot be made: {problem.strerror}.") from None
        return keys

    @classmethod
    def read(cls, path: AnyPath) -> Self:
        """Read keys from a file of this user to which others have no rights. Raises `ConfigError`."""
        path = Path(path).expanduser()
        try:
            with opened_file(path) as file:
                mode = stat.S_IMODE(os.fstat(file).st_mode)
                data = os.read(file, _MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            advice = "copy the one that was given to the core, `rollout-engine core --key-file`, to this machine"
            raise ConfigError(f"key_file={str(path)!r} does not exist: {advice}.") from None
        except OSError as problem:
            raise ConfigError(f"key_file={str(path)!r} is not read: {problem.strerror}.") from None
        if mode & OTHERS:
            why = f"others have rights to it (mode {mode:04o}), and may have its keys"
            raise ConfigError(f"key_file={str(path)!r} is not used: {why}. Make a new one, or run chmod 600 on it.")
        try:
            if len(data) > _MAX_FILE_BYTES:
                raise msgspec.DecodeError(f"it has more than {_MAX_FILE_BYTES} bytes")
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            made = "rollout-engine core --key-file makes one where there is none"
            raise ConfigError(f"key_file={str(path)!r} is no file of keys ({problem}): {made}.") from None

    @classmethod
    def read_or_write(cls, path: AnyPath) -> Self:
        """Read keys from a file, which is made if there is none. Raises `ConfigError`."""
        path = Path(path).expanduser()
        return cls.read(path) if os.path.lexists(path) else cls.write(path)

    def __repr__(self) -> str:
        return "Keys(...)"  # no secret in a log or a traceback


def public_key(secret: str) -> bytes:
    """The public key that belongs to a secret one. Raises `ValueError` or `zmq.ZMQError` for a malformed key."""
    if len(secret) != _KEY_CHARS:
        raise ValueError(f"a key has {_KEY_CHARS} characters")
    return bytes(zmq.curve_public(secret.encode()))
