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

from rollout_engine.model.geometry import LayerGeometry

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "ROLLOUT_ENGINE_CACHE"
"""Environment variable that moves the cache away from the user's cache directory."""

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
        return msgspec.json.decode((_directory() / f"{key}.json").read_bytes(), type=list[LayerGeometry])
    except (OSError, msgspec.DecodeError):
        return None


def write(key: str, geometry: list[LayerGeometry]) -> None:
    """Remember that `key` passed. A cache that cannot be written costs time at the next load, nothing else."""
    try:
        _directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=_directory(), delete=False) as file:
            file.write(msgspec.json.encode(geometry))
        os.replace(file.name, _directory() / f"{key}.json")
    except OSError as problem:
        logger.debug("The gate's verdict could not be kept: %s", problem)


def _directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(home) / "rollout_engine") / "gate"


@cache
def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*(_PACKAGE / "kernels").rglob("*.py"), *(_PACKAGE / "model").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
