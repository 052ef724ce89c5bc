"""The file that `--out` names: checked before a command works for minutes, and written after it."""

import os
from pathlib import Path

from rollout_engine.base.errors import ConfigError, RequestError


def check_out(out: Path, name: str) -> None:
    """Raise `RequestError` if `out` cannot be written, before there is anything to lose. Advises the file `name`."""
    if not out.parent.is_dir():
        raise RequestError(f"--out {out} cannot be written: make the folder {out.parent} first.")
    if out.is_dir():
        raise RequestError(f"--out {out} cannot be written: it is a folder. Name a file, as {out}/{name}.")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise RequestError(f"--out {out} cannot be written: permission is denied. Name a file that you may write.")


def write_out(out: Path, text: str) -> None:
    """Write the file. Raises `ConfigError` if that fails."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"--out {out} cannot be written: {problem.strerror}.") from None
