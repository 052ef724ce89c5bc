"""Caches results of the gate on disk: one small JSON file per architecture, configuration and versions.

Files are written under a temporary name and renamed, so readers and writers need no lock. An unreadable file counts as
absent.
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
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.pictures import PictureAttention
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.latent_attention import has_latents
from rollout_engine.model.modules.mixers import mixers_of
from sync.own_files import cache_directory

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_IRRELEVANT = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures"}


def key_of(module: PreTrainedModel, whole: PretrainedConfig | None = None) -> str:
    """Digest of everything that the gate's result depends on; weights and dtype are not part of it.

    `whole`: the configuration of the composite that `module` is a part of.
    """
    own = [type(module).__qualname__, repr((has_latents(module), len(mixers_of(module))))]
    return _key_of(own, module.config, whole)


def key_of_pictures(config: PretrainedConfig) -> str:
    """Digest of everything that the trial of a composite's pictures depends on."""
    return _key_of(["pictures"], config)


def _key_of(facts: list[str], *configs: PretrainedConfig | None) -> str:
    facts = [*facts, torch.__version__, transformers.__version__]
    for each in configs:
        config = {} if each is None else each.to_dict()
        facts.append(repr(sorted((name, value) for name, value in config.items() if name not in _IRRELEVANT)))
    facts += [torch.backends.cpu.get_cpu_capability(), _source_digest()]
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()


def read(key: str) -> list[LayerGeometry] | None:
    """The geometry cached under `key`; None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((cache_directory("gate") / f"{key}.json").read_bytes(), type=list[LayerGeometry])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write(key: str, geometry: list[LayerGeometry]) -> None:
    """Cache the geometry under `key`. A cache that cannot be written only costs time at the next load."""
    _write(f"{key}.json", geometry)


def read_pictures(key: str) -> PictureAttention | None:
    """The result of the trial of a composite's pictures under `key`, a `key_of_pictures`; None: it has passed none."""
    try:
        written = (cache_directory("gate") / f"{key}.pictures").read_bytes()
        found: PictureAttention = msgspec.json.decode(written, type=PictureAttention)
        return found
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write_pictures(key: str, attention: PictureAttention) -> None:
    """Note that the composite of `key`, a `key_of_pictures`, has passed the trial of its pictures, and its result."""
    _write(f"{key}.pictures", attention)


def _write(name: str, found: object) -> None:
    try:
        cache_directory("gate").mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_directory("gate"), delete=False) as file:
            file.write(msgspec.json.encode(found))
        os.replace(file.name, cache_directory("gate") / name)
    except OSError as problem:
        logger.debug("The gate's result could not be cached: %s", problem)


@cache
def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    folders = (_PACKAGE / "kernels", _PACKAGE / "model")
    sources = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()
