"""Makes a directory of a GGUF file, to be read like any checkpoint's: a description of the model, and a link to it.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json
    model.gguf                           a link to the file, whose weights are read by `model/loading/gguf_weights.py`

It is in the user's cache directory, under a name that follows from the file's path, size and time, and is made once.
"""

import json
import logging
import os
import secrets
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.config import config_of, token_ids
from rollout_engine.base.gguf.header import SUFFIX, GgufHeader
from rollout_engine.base.gguf.tokenizer import tokenizer_config_of, tokenizer_of
from rollout_engine.base.version import VERSION
from sync.own_files import CACHE_VARIABLE, cache_directory

logger = logging.getLogger("rollout_engine")

CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_LINK = f"model{SUFFIX}"
_FORM = 1
"""Raise it when other files are written of the same header."""


def only_gguf(directory: Path) -> Path | None:
    """The one GGUF file of a directory without config.json; None if there is none. Raises `ConfigError` for several."""
    found = sorted(directory.glob(f"*{SUFFIX}"))
    if (directory / CONFIG).exists() or not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"{directory} has {len(found)} GGUF files: give the path of one, such as {found[0]}.")
    return found[0]


def describe_gguf(path: Path) -> Path:
    """The directory that describes a GGUF file. Raises `ConfigError`, naming it, if it is damaged or not served."""
    path = path.resolve()
    try:
        status = path.stat()
        stamp = (VERSION, _FORM, str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        directory = cache_directory("gguf") / xxhash.xxh3_128_hexdigest(repr(stamp).encode())
        if not (directory / _TOKENIZER).exists():
            _write(directory, path, _files(GgufHeader.read(path)))
        return directory
    except OSError as problem:
        advice = f"Set {CACHE_VARIABLE} to a directory that can be written"
        raise ConfigError(
            f"{path} could not be described in {problem.filename}: {problem.strerror}. {advice}."
        ) from None


def _files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    files = {CONFIG: config_of(header), "generation_config.json": token_ids(header)}
    try:
        return files | {_TOKENIZER: tokenizer_of(header), "tokenizer_config.json": tokenizer_config_of(header)}
    except ConfigError as problem:
        _warn_once(f"{problem}. Give tokenizer= with the original one, or skip_tokenizer_init=True.")
        return files


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _write(directory: Path, path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write the directory next to its place first: another process may be writing the same."""
    unfinished = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    unfinished.mkdir(parents=True)
    try:
        for name, content in files.items():
            (unfinished / name).write_text(json.dumps(content))
        (unfinished / _LINK).symlink_to(path)
        with suppress(OSError):  # it is there: another process was first, or it has no tokenizer
            os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
