"""Environments of skyrl-gym: "skyrl_gym:gsm8k", or "skyrl_gym:my_module:MyEnv" for a class that is not registered.

    make_env("skyrl_gym:gsm8k", rows="gsm8k.jsonl")
    {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_spec": {"method": "rule", "ground_truth": "5"}}

A row is as in SkyRL's data sets: "prompt", messages or a text, and the environment's own fields. An
episode has the row `rows[seed % len(rows)]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from envs_adapters.base import Action, Messages, Observation
from envs_adapters.rows import Row, Rows, read_rows, row_of
from rollout_engine.base.errors import ConfigError, refused, unknown_name

TRAITS: dict[str, Any] = {}

_SINGLE_TURN = ("aime", "gsm8k", "lcb")


def make(
    name: str, *, rows: Rows, env_config: Mapping[str, Any] | None = None, max_turns: int | None = None
) -> "SkyRLGymEnv":
    """One environment.

    Args:
        rows: dicts, or a JSONL file of them; everything but "prompt" is passed to the environment as its `extras`.
        env_config: the environment's configuration, for example {"search_url": ...} of "search".
        max_turns: overrides the rows' "max_turns", for environments that have such a limit.
    """
    return SkyRLGymEnv(name, rows, dict(env_config or {}), max_turns)


def check(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Raise `ConfigError` unless the environment exists and accepts the first row. Returns its traits."""
    if "rows" not in options:
        raise ConfigError(f"skyrl_gym:{name} needs the option rows: a list of dicts, or the path of a JSONL file.")
    if ":" not in name:
        from skyrl_gym.envs.registration import registry

        if name not in registry:
            raise ConfigError(unknown_name("environment of skyrl_gym", name, registry))
    row = read_rows(options["rows"], ["prompt"])[0]
    limit = options.get("max_turns")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(refused("max_turns", limit, "an int of at least 1"))
    try:
        _make(name, row, options.get("env_config") or {}, limit).close()
    except Exception as problem:
        hint = "its rows lack a field that it reads, or it needs `env_config`"
        text = f"skyrl_gym:{name} refuses the first row ({hint}): {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem
    return {"is_single_turn": name in _SINGLE_TURN}


class SkyRLGymEnv:
    """An episode of a `skyrl_gym.Env`.

    `done` is `terminated`: skyrl-gym does not separate a limit of turns from an end. Its last `info` has also
    "metrics", the environment's own.
    """

    def __init__(self, name: str, rows: Rows, env_config: Mapping[str, Any], max_turns: int | None) -> None:
        self._name, self._rows, self._config, self._max_turns = name, rows, env_config, max_turns
        self._env: Any = None

    def reset(self, seed: int) -> Messages | Observation:
        row = row_of(self._rows, seed)
        self._env = _make(self._name, row, self._config, self._max_turns)
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages, info = self._env.init([dict(message) for message in prompt])
        return Observation(_check_messages(messages), info=info or {})

    def step(self, action: Action) -> Observation:
        output = self._env.step(action.text)
        replaced = output.get("postprocessed_action")
        if replaced is not None and replaced != action.text:
            advice = "Stop answers where the environment cuts them, by SamplingParams(stop=[...])"
            raise ValueError(f"skyrl_gym:{self._name} replaces the answer that was sampled by another one. {advice}.")
        done = bool(output["done"])
        info = dict(output.get("metadata") or {})
        if done:
            info["metrics"] = self._env.get_metrics()
        messages = () if done else _check_messages(output["observations"])
        return Observation(messages, reward=float(output["reward"]), terminated=done, info=info)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _make(name: str, row: Row, env_config: Mapping[str, Any], max_turns: int | None) -> Any:
    import skyrl_gym
    from omegaconf import OmegaConf
    from skyrl_gym.envs.registration import EnvSpec

    extras = {field: value for field, value in row.items() if field != "prompt"}
    if max_turns is not None:
        extras["max_turns"] = max_turns
    known = EnvSpec(id=name, entry_point=name) if ":" in name else name
    return skyrl_gym.make(known, env_config=OmegaConf.create(dict(env_config)), extras=extras)


def _check_messages(messages: Any) -> Sequence[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(refused("observations", messages, "a list of messages"))
    return [dict(message) for message in messages]
