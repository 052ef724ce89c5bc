"""Locations of models and tokenizers: a directory or GGUF file of this machine, or an id of the Hugging Face hub."""

import difflib
import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    IncompleteSnapshotError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.directory import describe_gguf, only_gguf
from rollout_engine.base.gguf.header import SUFFIX
from sync.own_files import require_regular

DESCRIPTION_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]
_SECOND_COPIES = [*(f"*/{name}" for name in DESCRIPTION_FILES + WEIGHT_FILES if name != "*.jinja"), "consolidated*"]
"""The same weights again, in formats of other programs. Templates may be in a folder of their own."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LOCAL = "give the path of a local directory"
_LOG_IN = "log in (hf auth login, or HF_TOKEN)"


def find_directory(name: str, *, weights: bool, field: str = "model") -> Path:
    """The local directory of `name`: a path, or a hub id, whose files are downloaded (`weights`: also its weights).

    For a GGUF file, or a directory with one and no config.json, it is the directory that describes the file. The hub is
    asked once; if it cannot be reached, its cache is used. Raises `ConfigError` naming `field` when there is no such
    directory and neither the hub nor its cache has one.
    """
    path = Path(located(field, name))
    if path.is_dir():
        _check_kinds(path, field)
        gguf = only_gguf(path)
        return path if gguf is None else describe_gguf(gguf)
    if path.exists():
        return describe_gguf(path)
    wanted = DESCRIPTION_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=_SECOND_COPIES))
    except Exception as problem:  # absent and forbidden are OSErrors, a proxy's are of the HTTP client's own kinds
        missing = f"the path does not exist ({describe_missing(Path(name))})"
        reason, advice = _explain(name, problem)
        raise ConfigError(
            f"{field}='{name}': {missing}, and as a hub id it could not be fetched: {reason}. {advice}."
        ) from None


def _check_kinds(directory: Path, field: str) -> None:
    """Raise `ConfigError` for a pipe or device in place of a file that is read: opening one may block indefinitely."""
    for path in directory.iterdir():
        is_read = any(path.match(pattern) for pattern in DESCRIPTION_FILES + WEIGHT_FILES)
        if is_read and path.exists() and not path.is_dir():
            try:
                require_regular(path)
            except OSError as problem:
                raise ConfigError(f"{field}='{directory}': {path} cannot be opened: {problem.strerror}.") from None


def located(field: str, name: str) -> str:
    """Return `name` as it can be loaded: a directory or GGUF file, with `~` expanded, or a hub id as it is.

    Raises `ConfigError` naming `field` if there is no such directory and `name` cannot be a hub id.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir() or (path.suffix == SUFFIX and path.exists()):
        return str(path)
    if path.exists():
        what = f"{field}='{name}' is a file"
        raise ConfigError(
            f"{what}: give the checkpoint's directory (the one that holds config.json), or a {SUFFIX} file."
        )
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


def _explain(name: str, problem: Exception) -> tuple[str, str]:
    """Explain why the hub gave nothing, and what to do."""
    cause = problem.__cause__ or problem
    cache = f"its cache {constants.HF_HUB_CACHE}"
    if isinstance(problem, IncompleteSnapshotError):
        advice = f"Download the rest where there is a network (hf download {name}), or {_LOCAL}"
        return f"the hub cannot be reached, and {cache} has only a part of it", advice
    if isinstance(cause, OfflineModeIsEnabled):
        advice = f"{_LOCAL.capitalize()}, or unset HF_HUB_OFFLINE to download it"
        return f"HF_HUB_OFFLINE is set, and {cache} has no copy", advice
    if isinstance(cause, GatedRepoError):
        advice = f"Ask for access at https://huggingface.co/{name} and {_LOG_IN}, or {_LOCAL}"
        return "the hub gives it only to accounts that have asked for access", advice
    if isinstance(cause, RepositoryNotFoundError):
        return "the hub has no such model, or it is private", f"Check the spelling, {_LOG_IN}, or {_LOCAL}"
    if isinstance(cause, HFValidationError | ValueError):
        return _first_line(cause), f"Check the spelling, or {_LOCAL}"
    advice = f"{_LOCAL.capitalize()}, or download it where there is a network (hf download {name})"
    return f"the hub cannot be reached ({_first_line(cause)}), and {cache} has no copy", advice


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines() or ["no details"]
    return f"{type(problem).__name__}: {lines[0].removesuffix('.')}"
