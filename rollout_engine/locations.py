"""Locations of models and tokenizers: a directory of this machine, or an id of the Hugging Face hub."""

import difflib
import os
import re
from pathlib import Path

from rollout_engine.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def located(field: str, name: str) -> str:
    """Return `name` as it can be loaded: a directory, with `~` expanded, or a hub id as it is.

    Raises `ConfigError` naming `field` if there is no such directory and `name` cannot be a hub id.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return str(path)
    if path.exists():
        what = f"{field}='{name}' is a file"
        raise ConfigError(f"{what}: give the checkpoint's directory (the one that holds config.json).")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{field}='{name}' is a path that does not exist: {describe_missing(path)}.")
    return name


def describe_missing(path: Path) -> str:
    """Describe for a message which part of `path` does not exist, and the closest name that does."""
    path = path.absolute()
    there = next(parent for parent in path.parents if parent.is_dir())
    wanted = path.relative_to(there).parts[0]
    try:
        names = [entry.name for entry in there.iterdir()]
    except OSError as problem:
        return f"{there} cannot be listed ({problem.strerror})"
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f" Did you mean '{there / close[0]}'?" if close else ""
    return f"{there} has no '{wanted}'.{hint}".removesuffix(".")
