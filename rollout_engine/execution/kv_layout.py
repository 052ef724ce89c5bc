"""Facts that the bytes of KV depend on, apart from weights and tokens: the namespace in which engines share them."""

import hashlib
import json
from typing import Protocol

import torch
from transformers import PretrainedConfig

from rollout_engine.base.config import EngineConfig
from rollout_engine.execution.made_with import arithmetic_of
from rollout_engine.kernels.cpu.build import describe_kernels
from rollout_engine.kv.connector import KVLayout
from rollout_engine.model.backend import Backend

_OF_FILES = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "_commit_hash")
"""Entries of a configuration about its origin."""


class Transfer(Protocol):
    """Whole blocks as they are moved: by one process, or by all ranks of a model that is cut."""

    block_bytes: int
    """Bytes of a block."""
    state_bytes: int
    """Bytes of a slot of states; 0 if there are none."""

    def describe_dtypes(self) -> str:
        """Dtypes of a block's rows."""
        ...

    def describe_shapes(self) -> str:
        """Shapes and dtypes of a block's and a slot's rows, in order."""
        ...


def describe_layout(
    config: EngineConfig, model: PretrainedConfig, backend: Backend, transfer: Transfer, device: torch.device
) -> KVLayout:
    """The layout of a loaded model's blocks. Engines of equal layouts and weights have equal KV."""
    settings = {
        "deterministic": str(backend.is_deterministic),
        "quantization": str(config.quantization),
        **arithmetic_of(device),
    }
    if device.type == "cpu":  # other compilers, or none, make other sums
        settings["kernels"] = describe_kernels()
    return KVLayout(
        model=f"{type(model).__name__} {_digest_of(model)}",
        dtype=transfer.describe_dtypes(),
        block_size=config.tokens_per_block,
        block_bytes=transfer.block_bytes,
        state_bytes=transfer.state_bytes,
        made_with="; ".join(f"{name} {value}" for name, value in sorted(settings.items())),
        pool=f"{device.type}: {transfer.describe_shapes()}",
    )


def _digest_of(model: PretrainedConfig) -> str:
    """Digest of a configuration, without the entries that name its files."""
    entries = {name: value for name, value in model.to_dict().items() if name not in _OF_FILES}
    return hashlib.blake2b(json.dumps(entries, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
