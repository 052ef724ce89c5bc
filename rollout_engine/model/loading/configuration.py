"""Reads config.json of a checkpoint, and refuses one that cannot be that of its weights."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.checkpoint import as_config_errors
from rollout_engine.model.loading.type_aliases import config_of_alias
from sync.checkpoint import CONFIG_FILE
from sync.file_snapshot import SnapshotFile
from sync.manifest import decode_json
from sync.quantised.reader import CheckpointTensor

_COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
_MOST_TIMES = 4
"""A module of more than this many times the stored values is refused before it has memory. Tied weights count twice."""


def read_config(directory: Path) -> tuple[PretrainedConfig, SnapshotFile]:
    """The configuration, and a snapshot of its file to check later."""
    path = directory / CONFIG_FILE
    if not os.path.lexists(path):
        raise ConfigError(
            f"{directory} has no config.json, so it is not a checkpoint. Give the directory that holds it."
        )
    with as_config_errors():
        file = SnapshotFile(path)
    raw = read_json(file)
    aliased = config_of_alias(raw, path)
    try:
        config = aliased or AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as problem:  # transformers raises many kinds of errors here
        if "auto_map" in raw:
            raise ConfigError(
                f"{path}: model_type '{raw.get('model_type')}' needs code shipped with the checkpoint (auto_map), and "
                "such code is never run here. Use an architecture that transformers has built in."
            ) from None
        raise ConfigError(f"{path} is not a configuration transformers can read: {problem}") from None
    for each in (config, getattr(config, "text_config", None)):
        if each is not None and hasattr(each, "quantization_config"):
            del each.quantization_config  # weights are dequantised as they are read
    names = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{path}: architectures={names!r:.80} is not a list of names.")
    if config.dtype is not None and not _is_float_dtype(config.dtype):
        raise ConfigError(
            f"{path}: dtype={raw.get('dtype', raw.get('torch_dtype'))!r} is not a floating dtype of torch."
        )
    return config, file


def read_json(file: SnapshotFile) -> dict[str, Any]:
    """The content of a JSON file. Raises `ConfigError`."""
    with as_config_errors():
        content: dict[str, Any] = decode_json(file.content(), dict[str, Any], f"{file.path} is not valid JSON")
    return content


def make_size_check(
    directory: Path, hf_config: PretrainedConfig, entries: list[CheckpointTensor]
) -> Callable[[PreTrainedModel], None]:
    """A check that a module is not far larger than the checkpoint, before it is given memory.

    Raises `ConfigError` at once for more layers or experts than the checkpoint can have.
    """
    path, largest = directory / CONFIG_FILE, max([len(entries), *(size for entry in entries for size in entry.shape)])
    for name in _COUNTS if entries else ():
        count = getattr(hf_config, name, None)
        if isinstance(count, int) and count > largest:
            raise ConfigError(f"{path}: {name}={count} is more than the {len(entries)} stored tensors have room for.")

    def check(module: PreTrainedModel) -> None:
        needed = sum(tensor.numel() for tensor in module.state_dict().values())
        stored = sum(math.prod(entry.shape) for entry in entries)
        if entries and needed > _MOST_TIMES * stored:
            raise ConfigError(
                f"{path} describes a model of {needed} values, and its files have {stored}: one of the two is not of "
                "this model, or damaged. Save or download it again."
            )

    return check


def _is_float_dtype(dtype: object) -> bool:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return isinstance(found, torch.dtype) and found.is_floating_point
