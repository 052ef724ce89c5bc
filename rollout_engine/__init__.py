"""rollout_engine: makes rollouts for reinforcement learning on language models.

>>> from rollout_engine import RolloutPolicy, SamplingParams, exact

Names are imported when they are first used (PEP 562), so `import rollout_engine` loads nothing heavy.

The environment variable ROLLOUT_ENGINE_LOG_LEVEL (debug, info, warning or error) sets how much the engine tells. That
goes to standard error, unless the program has set up Python's `logging` itself.
"""

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from rollout_engine.base.version import VERSION

if TYPE_CHECKING:  # editors and type checkers read these; a test compares them with `_NAMES`
    from rollout_engine import exact as exact
    from rollout_engine import testing as testing
    from rollout_engine.base import errors as errors
    from rollout_engine.base.beam_search import BeamSearchOutput as BeamSearchOutput
    from rollout_engine.base.beam_search import BeamSearchParams as BeamSearchParams
    from rollout_engine.base.config import EngineConfig as EngineConfig
    from rollout_engine.base.errors import CallTimeoutError as CallTimeoutError
    from rollout_engine.base.errors import ChecksumError as ChecksumError
    from rollout_engine.base.errors import ConfigError as ConfigError
    from rollout_engine.base.errors import DirtyWeightsError as DirtyWeightsError
    from rollout_engine.base.errors import DrainTimeoutError as DrainTimeoutError
    from rollout_engine.base.errors import EngineDeadError as EngineDeadError
    from rollout_engine.base.errors import EngineGenerateError as EngineGenerateError
    from rollout_engine.base.errors import EpisodeError as EpisodeError
    from rollout_engine.base.errors import GenerateTimeoutError as GenerateTimeoutError
    from rollout_engine.base.errors import LifecycleError as LifecycleError
    from rollout_engine.base.errors import ManifestMismatchError as ManifestMismatchError
    from rollout_engine.base.errors import RequestError as RequestError
    from rollout_engine.base.errors import RetryableError as RetryableError
    from rollout_engine.base.errors import RewardError as RewardError
    from rollout_engine.base.errors import RolloutEngineError as RolloutEngineError
    from rollout_engine.base.errors import RPCError as RPCError
    from rollout_engine.base.errors import RPCTimeoutError as RPCTimeoutError
    from rollout_engine.base.errors import StaleVersionError as StaleVersionError
    from rollout_engine.base.errors import StepDeadlineError as StepDeadlineError
    from rollout_engine.base.errors import StepMemoryError as StepMemoryError
    from rollout_engine.base.errors import TeacherError as TeacherError
    from rollout_engine.base.errors import TransferTimeoutError as TransferTimeoutError
    from rollout_engine.base.errors import WeightUpdateError as WeightUpdateError
    from rollout_engine.base.lora_request import LoRAInfo as LoRAInfo
    from rollout_engine.base.lora_request import LoRARequest as LoRARequest
    from rollout_engine.base.metrics import EngineMetrics as EngineMetrics
    from rollout_engine.base.metrics import StatLogger as StatLogger
    from rollout_engine.base.outputs import CompletionOutput as CompletionOutput
    from rollout_engine.base.outputs import Logprob as Logprob
    from rollout_engine.base.outputs import PoolingOutput as PoolingOutput
    from rollout_engine.base.outputs import PoolingRequestOutput as PoolingRequestOutput
    from rollout_engine.base.outputs import RequestOutput as RequestOutput
    from rollout_engine.base.outputs import UpdateReport as UpdateReport
    from rollout_engine.base.outputs import VersionSpan as VersionSpan
    from rollout_engine.base.pooling_params import PoolingParams as PoolingParams
    from rollout_engine.base.sampling_params import SamplingParams as SamplingParams
    from rollout_engine.base.speculation_config import SpeculationConfig as SpeculationConfig
    from rollout_engine.batches import advantages as advantages
    from rollout_engine.batches.concat import concat as concat
    from rollout_engine.batches.jsonl import to_jsonl as to_jsonl
    from rollout_engine.batches.minibatches import minibatches as minibatches
    from rollout_engine.batches.notebook import show as show
    from rollout_engine.batches.rollout_files import read_jsonl as read_jsonl
    from rollout_engine.batches.summary import RolloutBatch as RolloutBatch
    from rollout_engine.batches.trl import to_trl as to_trl
    from rollout_engine.batches.trl import to_trl_rollout as to_trl_rollout
    from rollout_engine.exact import routing as routing
    from rollout_engine.exact.master_weights import float32_masters as float32_masters
    from rollout_engine.faces.async_llm import AsyncLLM as AsyncLLM
    from rollout_engine.faces.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from rollout_engine.faces.llm import LLM as LLM
    from rollout_engine.faces.llm_engine import LLMEngine as LLMEngine
    from rollout_engine.faces.load_balancer import LoadBalancer as LoadBalancer
    from rollout_engine.faces.rollout_service import RolloutService as RolloutService
    from rollout_engine.faces.rollout_service import make_rollout_service as make_rollout_service
    from rollout_engine.fleet.plan.balancer import BalancerStats as BalancerStats
    from rollout_engine.fleet.run.replica_health import ReplicaHealth as ReplicaHealth
    from rollout_engine.looking.step_log import StepLog as StepLog
    from rollout_engine.model.sampling.logits_processors import LogitsProcessor as LogitsProcessor
    from rollout_engine.model.sampling.logits_processors import SequenceView as SequenceView
    from rollout_engine.rollouts.agents.agent import Agent as Agent
    from rollout_engine.rollouts.collector import CollectorStats as CollectorStats
    from rollout_engine.rollouts.collector import RolloutCollector as RolloutCollector
    from rollout_engine.rollouts.evaluation.report import EvalReport as EvalReport
    from rollout_engine.rollouts.evaluation.sweep import Sweep as Sweep
    from rollout_engine.rollouts.evaluation.tasks import EvalTask as EvalTask
    from rollout_engine.rollouts.policy import RolloutPolicy as RolloutPolicy
    from rollout_engine.rollouts.replay import ReplayReport as ReplayReport
    from rollout_engine.rollouts.replay import replay as replay
    from rollout_engine.rollouts.reward_model import RewardModel as RewardModel
    from rollout_engine.rollouts.teachers import Teacher as Teacher
    from rollout_engine.telemetry.stat_loggers import PrometheusLogger as PrometheusLogger

__version__ = VERSION

_NAMES = {
    "rollout_engine.batches.concat": ("concat",),
    "rollout_engine.batches.jsonl": ("to_jsonl",),
    "rollout_engine.batches.minibatches": ("minibatches",),
    "rollout_engine.batches.notebook": ("show",),
    "rollout_engine.batches.rollout_files": ("read_jsonl",),
    "rollout_engine.batches.summary": ("RolloutBatch",),
    "rollout_engine.batches.trl": ("to_trl", "to_trl_rollout"),
    "rollout_engine.base.beam_search": ("BeamSearchOutput", "BeamSearchParams"),
    "rollout_engine.base.config": ("EngineConfig",),
    "rollout_engine.base.errors": (
        "CallTimeoutError",
        "ChecksumError",
        "ConfigError",
        "DirtyWeightsError",
        "DrainTimeoutError",
        "EngineDeadError",
        "EngineGenerateError",
        "EpisodeError",
        "GenerateTimeoutError",
        "LifecycleError",
        "ManifestMismatchError",
        "RPCError",
        "RPCTimeoutError",
        "RequestError",
        "RetryableError",
        "RewardError",
        "RolloutEngineError",
        "StaleVersionError",
        "StepDeadlineError",
        "StepMemoryError",
        "TeacherError",
        "TransferTimeoutError",
        "WeightUpdateError",
    ),
    "rollout_engine.rollouts.evaluation.report": ("EvalReport",),
    "rollout_engine.rollouts.evaluation.sweep": ("Sweep",),
    "rollout_engine.rollouts.evaluation.tasks": ("EvalTask",),
    "rollout_engine.faces.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "rollout_engine.faces.llm": ("LLM",),
    "rollout_engine.faces.llm_engine": ("LLMEngine",),
    "rollout_engine.faces.load_balancer": ("LoadBalancer",),
    "rollout_engine.faces.rollout_service": ("RolloutService", "make_rollout_service"),
    "rollout_engine.fleet.plan.balancer": ("BalancerStats",),
    "rollout_engine.fleet.run.replica_health": ("ReplicaHealth",),
    "rollout_engine.telemetry.stat_loggers": ("PrometheusLogger",),
    "rollout_engine.looking.step_log": ("StepLog",),
    "rollout_engine.exact.master_weights": ("float32_masters",),
    "rollout_engine.base.metrics": ("EngineMetrics", "StatLogger"),
    "rollout_engine.model.sampling.logits_processors": ("LogitsProcessor", "SequenceView"),
    "rollout_engine.base.outputs": (
        "CompletionOutput",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
        "UpdateReport",
        "VersionSpan",
    ),
    "rollout_engine.rollouts.agents.agent": ("Agent",),
    "rollout_engine.rollouts.policy": ("RolloutPolicy",),
    "rollout_engine.base.pooling_params": ("PoolingParams",),
    "rollout_engine.rollouts.reward_model": ("RewardModel",),
    "rollout_engine.rollouts.teachers": ("Teacher",),
    "rollout_engine.rollouts.collector": ("CollectorStats", "RolloutCollector"),
    "rollout_engine.rollouts.replay": ("ReplayReport", "replay"),
    "rollout_engine.base.lora_request": ("LoRAInfo", "LoRARequest"),
    "rollout_engine.base.sampling_params": ("SamplingParams",),
    "rollout_engine.base.speculation_config": ("SpeculationConfig",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_LOG_LEVELS = ("debug", "info", "warning", "error")
_MODULES = {
    "advantages": "rollout_engine.batches.advantages",
    "errors": "rollout_engine.base.errors",
    "exact": "rollout_engine.exact",
    "routing": "rollout_engine.exact.routing",
    "testing": "rollout_engine.testing",
}

__all__ = ["__version__", *_MODULES, *_HOMES]


def _check_platform() -> None:
    if sys.platform == "win32":
        raise ImportError("rollout-engine runs on Linux and macOS, not on Windows: use WSL 2 there, which is a Linux.")


def _check_own_packages() -> None:
    """Raise `ImportError` where a file or folder of the user's is found in place of a package of this distribution."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("sync", "worker_ext"):
        found = sys.modules.get(name) or importlib.util.find_spec(name)
        path = getattr(found, "__file__", None) or getattr(found, "origin", None)
        if path is None and found is not None:  # a folder without code, found before an editable installation of ours
            path = os.path.join(*list(found.submodule_search_locations or [""])[:1], "")
        if path is None:
            raise ImportError(f"rollout-engine's package '{name}' is not in {root}: install rollout-engine again.")
        if os.path.dirname(os.path.realpath(path)) != os.path.join(root, name):
            raise ImportError(
                f"{path} hides rollout-engine's own package '{name}': rename it, or start the program from another "
                "folder."
            )


def _set_log_level() -> None:
    level = os.environ.get("ROLLOUT_ENGINE_LOG_LEVEL", "").strip()
    if not level:
        return
    if level.lower() not in _LOG_LEVELS:
        raise ValueError(f"ROLLOUT_ENGINE_LOG_LEVEL={level!r} is not allowed: must be one of {', '.join(_LOG_LEVELS)}.")
    import logging  # as heavy as all the rest of this file

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rollout_engine: %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger = logging.getLogger("rollout_engine")
    logger.setLevel(level.upper())
    logger.addHandler(handler)


_check_platform()
_check_own_packages()
_set_log_level()


def _close_to(name: str) -> str:
    if name.startswith("_"):  # asked for by tools
        return ""
    import difflib  # as late as it is needed

    close = difflib.get_close_matches(name, __all__, n=1, cutoff=0.75)
    return f" Did you mean '{close[0]}'?" if close else f" It has {', '.join(sorted(__all__))}."


if not TYPE_CHECKING:  # a type checker that sees this takes every name, and finds no misspelt one

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _HOMES:
            raise AttributeError(f"module 'rollout_engine' has no attribute '{name}'.{_close_to(name)}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
