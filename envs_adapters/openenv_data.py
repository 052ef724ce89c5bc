"""Actions and observations of OpenEnv as JSON objects, from and to text."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from envs_adapters.base import Messages, Observation, load
from rollout_engine.base.errors import ConfigError, refused

Convert: TypeAlias = Callable[[Any], Any] | str | Mapping[str, str]
"""A function, "module:attribute" of one, or {"field": NAME}."""


def observation_of(data: Mapping[str, Any], to_text: Callable[[Any], Messages]) -> Observation:
    """The observation in a message; its metadata goes to `info`, not to the policy."""
    observation = dict(data.get("observation") or {})
    metadata = observation.pop("metadata", None) or data.get("metadata") or {}
    reward = data.get("reward")
    done = bool(data.get("done"))
    info = {"observation": observation, "metadata": metadata}
    return Observation(to_text(observation), 0.0 if reward is None else float(reward), terminated=done, info=info)


def observation_text(observation: Mapping[str, Any]) -> str:
    """The text of an observation that is one text field, and JSON of any other."""
    values = list(observation.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)


def action_data(to_action: Callable[[str], Any], text: str) -> Mapping[str, Any]:
    """The action that an answer's text stands for."""
    data = to_action(text)
    if not isinstance(data, Mapping):
        raise ValueError(refused("action_from_text", data, "a function that returns a dict, the action's fields"))
    return data


def converter(option: Convert, *, is_action: bool) -> Callable[[Any], Any]:
    """The function that the option names."""
    if not isinstance(option, Mapping):
        return load(option)
    field = option["field"]
    return (lambda text: {field: text}) if is_action else (lambda observation: observation[field])


def text_field(name: str, schema: Mapping[str, Any]) -> str:
    """The only text field of an action's JSON schema. Raises `ConfigError` if others are required."""
    fields = {field: each for field, each in schema.get("properties", {}).items() if field != "metadata"}
    texts = [field for field, each in fields.items() if each.get("type") == "string" and "enum" not in each]
    needed = set(schema.get("required", ()))
    if len(texts) == 1 and needed <= set(texts):
        return str(texts[0])
    described = ", ".join(f"{field} ({each.get('type', 'any type')})" for field, each in fields.items()) or "none"
    hint = 'Give action_from_text: a function from text to a dict, such as "json:loads", or {"field": NAME}'
    raise ConfigError(f"openenv:{name}: an answer does not tell the action's fields, {described}. {hint}.")
