"""Reads a file while it grows, line by line."""

import os
from pathlib import Path

_MOST_READ = 8 << 20
"""Bytes read in one call, so that a reader that draws in between stays responsive."""
_LONGEST_LINE = 256 << 20


class FollowedFile:
    """A file that others append lines to. A last line that is only half there is kept back until it is whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_skipped = 0
        """Lines left out for being longer than 256 MiB."""
        self.is_behind = False
        """Whether the last call of `read` has left more to read."""
        self._offset, self._inode = 0, -1
        self._parts: list[bytes] = []
        """Pieces of the line that is not whole yet."""
        self._num_kept = 0
        self._skips = False

    def read(self) -> list[bytes]:
        """The lines that have become whole since the last call, without their ends: up to 8 MiB a call.

        A file that was replaced or shortened is read from its beginning again. One that is not there has no lines.
        """
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._offset, self._inode = 0, found.st_ino
                    self._drop()
                file.seek(self._offset)
                content = file.read(_MOST_READ)
        except OSError:
            return []
        self._offset += len(content)
        self.is_behind = len(content) == _MOST_READ
        *whole, rest = content.split(b"\n")
        lines = [line for line in map(self._end_line, whole) if line.strip()]
        self._keep(rest)
        return lines

    def _end_line(self, end: bytes) -> bytes:
        """The whole line of which this is the last piece; empty for one that was too long."""
        line = b"" if self._skips else b"".join([*self._parts, end])
        self._drop()
        return line

    def _keep(self, piece: bytes) -> None:
        if self._skips:
            return
        self._parts.append(piece)
        self._num_kept += len(piece)
        if self._num_kept > _LONGEST_LINE:
            self._drop()
            self._skips = True
            self.num_skipped += 1

    def _drop(self) -> None:
        self._parts.clear()
        self._num_kept, self._skips = 0, False
