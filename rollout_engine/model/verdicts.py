"""What the gate found, kept on disk: one small JSON file per architecture, configuration and versions.

Files are written whole under a temporary name and renamed, so readers and writers need no lock; a file that cannot be
read is as good as none.
"""

import hashlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

import msgspec
import torch
import transformers
from transformers import PreTrainedModel

from rollout_engine.kernels.cpu.build import cache_directory
from rollout_engine.model.geometry import LayerGeometry

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent.parent
_IRRELEVANT = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures"}


def key_of(module: PreTrainedModel) -> str:
    """Digest of all that a verdict depends on; weights and dtype are not part of it."""
    config = {name: value for name, value in module.config.to_dict().items() if name not in _IRRELEVANT}
    facts = [type(module).__qualname__, repr(sorted(config.items())), torch.__version__, transformers.__version__]
    facts += [torch.backends.cpu.get_cpu_capability(), _source_digest()]
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()


def read(key: str) -> list[LayerGeometry] | None:
    """The geometry of what passed under `key`; None when nothing readable is known of it."""
    try:
        return msgspec.json.decode((cache_directory("gate") / f"{key}.json").read_bytes(), type=list[LayerGeometry])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write(key: str, geometry: list[LayerGeometry]) -> None:
    """Remember that `key` passed. A cache that cannot be written costs time at the next load, nothing else."""
    try:
        cache_directory("gate").mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_directory("gate"), delete=False) as file:
            file.write(msgspec.json.encode(geometry))
        os.replace(file.name, cache_directory("gate") / f"{key}.json")
    except OSError as problem:
        logger.debug("The gate's verdict could not be kept: %s", problem)


@cache
def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    folders = (_PACKAGE / "kernels", _PACKAGE / "model")
    sources = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()
