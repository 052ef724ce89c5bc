"""Files that are replaced whole: a reader sees the old content or all of the new, whatever fails in between."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end of the block; if that raises, nothing has changed.

    A device, a pipe and a file in a directory in which none can be made are written in place. Raises `OSError`.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        with open(target, "wb") as file:
            yield file
        return
    unfinished = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        with _new_file(unfinished, target) as file:
            if target.exists():
                os.chmod(unfinished, target.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _new_file(path: Path, target: Path) -> BinaryIO:
    try:
        return open(path, "xb")
    except OSError as problem:
        problem.filename = str(target)  # the name that the caller gave
        raise
