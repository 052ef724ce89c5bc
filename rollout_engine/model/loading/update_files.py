"""Reads the weights of a path for an update: those that a load of it would have, of the model that is served.

published store             versions and digests of its own; read by `sync.published`
directory with safetensors  quantised or not; config.json, if it has one, must be of the same model
GGUF file, or directory     with one; its metadata must be of the same model
"""

import os
from pathlib import Path

from transformers import CONFIG_MAPPING, PretrainedConfig

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.config import config_of
from rollout_engine.base.gguf.directory import only_gguf
from rollout_engine.base.gguf.header import SUFFIX, GgufHeader
from rollout_engine.model.admission.unused_scales import without_unused_scales
from rollout_engine.model.loading.checkpoint import read_entries
from rollout_engine.model.loading.configuration import read_config
from rollout_engine.model.loading.gguf_weights import read_gguf
from rollout_engine.model.loading.same_model import check_same_model
from rollout_engine.model.loading.tower_files import with_module_names
from rollout_engine.model.modules.composites import text_config_of
from rollout_engine.model.modules.geometry import Refusal
from sync.checkpoint import CONFIG_FILE, is_checkpoint
from sync.errors import ManifestMismatch, SyncError
from sync.published import is_store
from sync.source import SourcePair, read_source


def read_update(path: Path, live: PretrainedConfig | None) -> list[SourcePair]:
    """(name, tensor) pairs of the weights at `path`; values are read and dequantised when asked for.

    `live`: the configuration of the model that is served; None: it is not compared. Raises `ManifestMismatch`, naming
    the file, for anything that a load of `path` would refuse, and for another model; `ChecksumMismatch` for files that
    are being rewritten.
    """
    try:
        gguf = _find_gguf(path)
        if gguf is not None:
            if live is not None:
                _check_gguf(gguf, live)
            return [(weight.name, weight) for weight in read_gguf(gguf)]
        found = _read_directory(path)
        if live is not None and not is_store(path) and os.path.lexists(path / CONFIG_FILE):
            found = with_module_names(found, _check_directory(path, live))
        return found
    except (ConfigError, Refusal) as problem:
        if isinstance(problem.__cause__, SyncError):
            raise problem.__cause__ from None
        raise ManifestMismatch(str(problem)) from problem


def _find_gguf(path: Path) -> Path | None:
    """The GGUF file that a load of `path` reads with its own configuration; None for other paths."""
    if path.suffix == SUFFIX and path.is_file():
        return path
    is_other = not path.is_dir() or is_store(path) or is_checkpoint(path)
    return None if is_other else only_gguf(path)


def _read_directory(path: Path) -> list[SourcePair]:
    has_gguf = path.is_dir() and not (is_store(path) or is_checkpoint(path)) and any(path.glob(f"*{SUFFIX}"))
    return [(entry.name, entry) for entry in read_entries(path)] if has_gguf else read_source(path)


def _check_gguf(path: Path, live: PretrainedConfig) -> None:
    fields = config_of(GgufHeader.read(path))
    found = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    check_same_model(path, found, live, fields)


def _check_directory(path: Path, live: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a directory. Raises `ManifestMismatch` if it is another model's."""
    config, file = read_config(path)
    try:
        text_config = without_unused_scales(config, text_config_of(config))
    except Refusal as reason:
        raise ManifestMismatch(f"{file.path}: {reason}.") from None
    check_same_model(file.path, text_config, live)
    file.check()
    return config
