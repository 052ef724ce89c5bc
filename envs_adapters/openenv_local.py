"""Environments of the package `openenv`, in this process."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from envs_adapters.base import Action, Messages, Observation, load
from envs_adapters.openenv_data import action_data, converter, observation_of, text_field
from rollout_engine.base.errors import ConfigError

logger = logging.getLogger(__name__)


class LocalEnv:
    """An episode of an `openenv` `Environment` in this process; awaitable if its methods are."""

    def __init__(
        self,
        name: str,
        to_action: Any,
        to_text: Callable[[Any], Messages],
        reset_options: dict[str, Any],
        arguments: dict[str, Any],
        action_class: type | str | None,
    ) -> None:
        self.env = load(name)(**arguments)
        self._action_class = _action_class(name, self.env, action_class)
        self._to_action = to_action or converter(
            {"field": text_field(name, self._action_class.model_json_schema())}, is_action=True
        )
        self._to_text, self._reset_options = to_text, reset_options

    def reset(self, seed: int) -> Observation | Awaitable[Observation]:
        """Start the episode."""
        method = self.env.reset_async if self._overrides("reset_async") else self.env.reset
        return self._observe(method(seed=seed, **self._reset_options))

    def step(self, action: Action) -> Observation | Awaitable[Observation]:
        """Hand the action over."""
        from openenv.core.env_server.serialization import deserialize_action

        made = deserialize_action(dict(action_data(self._to_action, action.text)), self._action_class)
        method = self.env.step_async if self._overrides("step_async") else self.env.step
        return self._observe(method(made))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _overrides(self, method: str) -> bool:
        from openenv.core.env_server.interfaces import Environment

        return getattr(type(self.env), method) is not getattr(Environment, method)

    def _observe(self, value: Any) -> Observation | Awaitable[Observation]:
        if inspect.isawaitable(value):
            return self._await(value)
        observation = value.model_dump(mode="json", exclude={"reward", "done"})
        data = {"observation": observation, "reward": value.reward, "done": value.done}
        return observation_of(data, self._to_text)

    async def _await(self, value: Awaitable[Any]) -> Observation:
        observed = self._observe(await value)
        assert isinstance(observed, Observation)
        return observed


def check_local(name: str, env: Any) -> dict[str, Any]:
    """Raise `ConfigError` if episodes of an `Environment` cannot be repeated. Returns its traits."""
    parameters = inspect.signature(env.reset).parameters
    if "seed" not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        raise ConfigError(f"openenv:{name}: its reset takes no `seed`: the samples of a group would begin differently.")
    if not env.SUPPORTS_CONCURRENT_SESSIONS:
        logger.warning(
            "openenv:%s does not declare SUPPORTS_CONCURRENT_SESSIONS: see that instances share no state", name
        )
    return {"placement": "processes"} if env.REQUIRES_SINGLE_THREAD_EXECUTOR else {}


def _action_class(name: str, env: Any, given: type | str | None) -> Any:
    from openenv.core.env_server.types import Action as OpenEnvAction

    candidates = [load(given) if isinstance(given, str) else given]
    bases = (base for each in type(env).__mro__ for base in vars(each).get("__orig_bases__", ()))
    candidates += [get_args(base)[0] for base in bases if get_args(base)]
    with suppress(NameError, TypeError):
        candidates.append(get_type_hints(type(env).step).get("action"))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, OpenEnvAction) and candidate is not OpenEnvAction:
            return candidate
    raise ConfigError(f"openenv:{name} does not declare the class of its actions: give it by action_class.")
