"""Environments of verifiers: "verifiers:NAME", the id of an installed environment package.

    make_env("verifiers:gsm8k", system_prompt="Think first.")

With verifiers 0.4, tasksets whose tasks ask one question are scored directly (`envs_adapters.verifiers_tasksets`); with
0.3, environments run whole, and ask the policy instead of a server (`envs_adapters.verifiers_rollouts`). An episode
plays row or task `seed % n` of the training data; of the evaluation data if there is no other.
"""

import json
from collections.abc import Mapping
from typing import Any

from envs_adapters import verifiers_rollouts, verifiers_tasksets
from envs_adapters.verifiers_rollouts import RolloutEnv
from envs_adapters.verifiers_tasksets import TaskEnv
from rollout_engine.base.errors import ConfigError, refused

TRAITS: dict[str, Any] = {}


def make(name: str, *, max_tasks: int | None = None, **options: Any) -> RolloutEnv | TaskEnv:
    """One episode.

    Args:
        max_tasks: rows or tasks at most, the first ones; needed if a taskset is infinite.
        options: of the environment's `load_environment` (0.3), or fields of its taskset's configuration (0.4).
    """
    if _loads_environments():
        return RolloutEnv(name, options, max_tasks)
    return TaskEnv(name, options, max_tasks)


def check(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Raise `ConfigError` unless the environment exists, and can be played one answer at a time."""
    rest = dict(options)
    limit = rest.pop("max_tasks", None)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(refused("max_tasks", limit, "an int of at least 1"))
    try:
        json.dumps(rest)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"verifiers:{name}: options must be plain data: {problem}.") from problem
    if _loads_environments():
        return verifiers_rollouts.check(name, rest, limit)
    return verifiers_tasksets.check(name, rest, limit)


def _loads_environments() -> bool:
    """Whether this is verifiers 0.3."""
    import verifiers

    return hasattr(verifiers, "load_environment")
