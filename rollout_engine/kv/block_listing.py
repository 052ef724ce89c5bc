"""The files of all blocks in a directory, and which of them were not used for the longest time.

directory / namespace (32 hex) / first two hex of the key / other 62 hex       a block
                                                        / .KEY.TOKEN           one that is being written
"""

import heapq
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from sync.own_files import opened_directory

UNFINISHED = "."
"""First character of the name of a file that is being written, or whose writer was killed."""
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{62}|\.[0-9a-f]{62}\.\w+")


class StoredFile(NamedTuple):
    """A file of a block; `path` is relative to the directory."""

    used_ns: int
    """Time of its last use, nanoseconds since 1970: its mtime."""
    num_bytes: int
    path: str

    @property
    def is_unfinished(self) -> bool:
        """Whether it was still being written when it was listed."""
        return os.path.basename(self.path).startswith(UNFINISHED)


class OldestFiles:
    """Those of the files shown to it that were not used for the longest time, up to a number of bytes."""

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._heap: list[tuple[int, int, str]] = []
        """(-used_ns, num_bytes, path): the newest first."""

    def add(self, file: StoredFile) -> None:
        """Show a file."""
        if self._num_bytes >= self._max_bytes and self._heap and -self._heap[0][0] <= file.used_ns:
            return
        heapq.heappush(self._heap, (-file.used_ns, file.num_bytes, file.path))
        self._num_bytes += file.num_bytes
        while self._heap and self._num_bytes - self._heap[0][1] >= self._max_bytes:
            self._num_bytes -= heapq.heappop(self._heap)[1]

    def in_order(self) -> list[StoredFile]:
        """The files, the one that was not used for the longest time first."""
        return sorted(StoredFile(-used, num_bytes, path) for used, num_bytes, path in self._heap)


def list_blocks(directory: int, namespaces: Sequence[str] | None = None) -> Iterator[StoredFile]:
    """The files of blocks below an open directory, of some namespaces or of all. Other files and links are left out."""
    found = namespaces if namespaces is not None else _names(directory, _NAMESPACE)
    for namespace in found:
        with suppress(OSError), opened_directory(namespace, dir_fd=directory) as opened:
            for folder in _names(opened, _FOLDER):
                with suppress(OSError), opened_directory(folder, dir_fd=opened) as inner:
                    yield from _files(inner, f"{namespace}/{folder}")


def _names(directory: int, pattern: re.Pattern[str]) -> list[str]:
    return [name for name in os.listdir(directory) if pattern.fullmatch(name)]


def _files(directory: int, path: str) -> Iterator[StoredFile]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if not _BLOCK.fullmatch(entry.name):
                continue
            with suppress(FileNotFoundError):  # another process removed it just now
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield StoredFile(status.st_mtime_ns, status.st_size, f"{path}/{entry.name}")
