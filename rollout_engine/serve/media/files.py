"""The directories from which the server reads files that requests name."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from rollout_engine.base.errors import ConfigError, RequestError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class AllowedDirectories:
    """Directories below which requests may name files. No link is followed below them, and no `..`.

    Args:
        directories: that exist; `ConfigError` otherwise.
    """

    def __init__(self, directories: Iterable[str]) -> None:
        self._roots: dict[tuple[str, ...], str] = {}
        """Names of a directory's path, as given and without links -> the path without links."""
        for each in directories:
            try:
                root = Path(each).resolve(strict=True)
                os.close(os.open(root, _DIRECTORY))
            except OSError as problem:
                text = f"allow_media_dir='{each:.200}' is not allowed: must be a directory that can be read"
                raise ConfigError(f"{text} ({problem.strerror}).") from None
            for path in (Path(os.path.abspath(each)), root):
                self._roots[path.parts[1:]] = str(root)

    def read(self, url: str, field: str, most: int) -> bytes:
        """The bytes of a file by its URL, "file:///data/a.png"; of one that is too long, `most` + 1.

        Raises `RequestError` naming the field.
        """
        root, names = self._place(url, field)
        try:
            descriptor = _open_below(root, names)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    with open(descriptor, "rb", closefd=False) as file:
                        return file.read(most + 1)
            finally:
                os.close(descriptor)
        except OSError as problem:
            hint = f"It cannot be read: {problem.strerror}. Links are not followed."
            raise RequestError.for_field(field, url, "the URL of a file that this server can read", hint) from None
        raise RequestError.for_field(field, url, "the URL of a regular file")

    def _place(self, url: str, field: str) -> tuple[str, list[str]]:
        """(the directory, the names below it) of a file's URL."""
        host, slash, rest = url[len("file://") :].partition("/")
        path = unquote(rest, errors="surrogateescape")
        names = [name for name in path.split("/") if name not in ("", ".")]
        if slash and host in ("", "localhost") and ".." not in names and "\0" not in path:
            for above, root in self._roots.items():
                if len(names) > len(above) and tuple(names[: len(above)]) == above:
                    return root, names[len(above) :]
        bound = "a data URL, or a file below a directory that this server was started with, without .. in its path"
        raise RequestError.for_field(field, url, bound, "Or start the server with --allow-media-dir DIR.")


def _open_below(root: str, names: list[str]) -> int:
    """Open a file by the names of its path below a directory, one by one, so that no link can lead elsewhere."""
    above = os.open(root, _DIRECTORY)
    try:
        for name in names[:-1]:
            below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
            above = below
        return os.open(names[-1], _FILE, dir_fd=above)
    finally:
        os.close(above)
