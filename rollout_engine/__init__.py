"""rollout_engine: makes rollouts for reinforcement learning on language models.

>>> from rollout_engine import RolloutPolicy, SamplingParams, exact

Names are imported when they are first used (PEP 562), so `import rollout_engine` loads nothing heavy.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "rollout_engine.config": ("EngineConfig",),
    "rollout_engine.errors": (
        "ChecksumError",
        "ConfigError",
        "DirtyWeightsError",
        "DrainTimeoutError",
        "EngineDeadError",
        "EngineGenerateError",
        "LifecycleError",
        "ManifestMismatchError",
        "RPCError",
        "RPCTimeoutError",
        "RequestError",
        "RetryableError",
        "RewardError",
        "RolloutEngineError",
        "StaleVersionError",
        "StepMemoryError",
        "TransferTimeoutError",
        "WeightUpdateError",
    ),
    "rollout_engine.frontend.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "rollout_engine.frontend.llm": ("LLM",),
    "rollout_engine.frontend.llm_engine": ("LLMEngine",),
    "rollout_engine.frontend.stat_loggers": ("PrometheusLogger",),
    "rollout_engine.metrics": ("EngineMetrics", "StatLogger"),
    "rollout_engine.model.logits_processors": ("LogitsProcessor", "SequenceView"),
    "rollout_engine.outputs": ("CompletionOutput", "RequestOutput", "UpdateReport", "VersionSpan"),
    "rollout_engine.policy": ("RolloutPolicy",),
    "rollout_engine.sampling_params": ("SamplingParams",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("exact", "testing")

__all__ = ["__version__", *_MODULES, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rollout_engine.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rollout_engine' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
