"""Environments by name: "family:name", one module of this package for each family.

A family's module has

    TRAITS               fields of `EnvSpec` that hold for all its environments
    check(name, options) raises `ConfigError` for a name or an option that the family does not have; may return fields
                         of `EnvSpec` for this environment alone
    make(name, **options)    one environment

and imports the package that it adapts only inside these functions.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, get_args

from envs_adapters import (
    dataset,
    gymnasium,
    math_verify,
    mcp,
    openenv,
    reasoning_gym,
    skyrl_gym,
    textarena,
    torchrl,
    verifiers,
)
from envs_adapters.base import EnvSpec, Placement
from rollout_engine.base.errors import ConfigError, refused, unknown_name


class Family(NamedTuple):
    """One family of environments."""

    module: ModuleType
    package: str
    """The package that must be importable; "" if none is needed."""
    extra: str
    """The extra of rollout-engine that installs it."""
    needs_name: bool = True
    """Whether "family" alone names nothing."""


FAMILIES: dict[str, Family] = {
    "dataset": Family(dataset, "", "", needs_name=False),
    "gymnasium": Family(gymnasium, "gymnasium", "gymnasium"),
    "math_verify": Family(math_verify, "math_verify", "math-verify", needs_name=False),
    "mcp": Family(mcp, "mcp", "mcp"),
    "openenv": Family(openenv, "websockets", "openenv"),
    "reasoning_gym": Family(reasoning_gym, "reasoning_gym", "reasoning-gym"),
    "skyrl_gym": Family(skyrl_gym, "skyrl_gym", "skyrl-gym"),
    "textarena": Family(textarena, "textarena", "textarena"),
    "torchrl": Family(torchrl, "torchrl", "torchrl"),
    "verifiers": Family(verifiers, "verifiers", "verifiers"),
}


_AGENT = "agent"
"""Begins the command of an agent, which rollouts play themselves."""


def import_package(factory: Any) -> None:
    """Import the package of a family's `make`, which may take longer than a step may. No-op for anything else."""
    for family in FAMILIES.values():
        if family.package and getattr(factory, "__module__", None) == family.module.__name__:
            import_module(family.package)


def make_env(
    target: str | Callable[..., Any],
    *,
    placement: Placement | None = None,
    num_workers: int | None = None,
    step_timeout: float | None = None,
    **options: Any,
) -> EnvSpec:
    """The environment that `target` names, for `RolloutPolicy.rollout(env=...)`; calling the result makes one.

    Args:
        target: "family:name", for example "reasoning_gym:spell_backward", or a class or function of your own.
        placement: "threads" or "processes", as in `EnvSpec`; None: the family's own, "threads" for your own.
        num_workers: threads or processes at most, as in `EnvSpec`.
        step_timeout: seconds for each `reset` and `step`; None: 60.
        options: of the family, as its module's `make` documents them; or arguments of your own class.

    Raises `ConfigError` for a family, name or option that does not exist, and for a package that is not installed.
    """
    given: dict[str, Any] = {"placement": placement, "num_workers": num_workers, "step_timeout": step_timeout}
    chosen = {name: value for name, value in given.items() if value is not None}
    _check(chosen)
    if not isinstance(target, str):
        if not callable(target):
            hint = "Give the class itself, or a function that makes one: each episode has an environment of its own."
            raise ConfigError(refused("target", target, "a name, a class or a function", hint))
        name = getattr(target, "__qualname__", type(target).__qualname__)
        return EnvSpec(target, options, name, **chosen)
    family_name, _, name = target.partition(":")
    family = FAMILIES.get(family_name)
    if family is None or (family.needs_name and not name):
        raise ConfigError(f"'{target}' names no environment; give 'family:name'. {_unknown(family_name)}")
    if family.package and find_spec(family.package) is None:
        advice = f"pip install 'rollout-engine[{family.extra}]'"
        raise ConfigError(f"{target}: the package '{family.package}' is not installed. {advice} installs it.")
    _check_options(target, family.module.make, options)
    traits = {**family.module.TRAITS, **(family.module.check(name, options) or {}), **chosen}
    return EnvSpec(family.module.make, {"name": name, **options}, target, **traits)


def _unknown(family_name: str) -> str:
    """Why there is no environment of this family without more of a name."""
    if family_name in FAMILIES:
        return "The name is missing."
    if family_name == _AGENT:
        return "An agent is none: rollout(tasks, env='agent:COMMAND') and Agent(...) take it as it is."
    return unknown_name("family", family_name, [*FAMILIES, _AGENT])


def _check(chosen: dict[str, Any]) -> None:
    if "placement" in chosen and chosen["placement"] not in get_args(Placement):
        raise ConfigError(refused("placement", chosen["placement"], " or ".join(map(repr, get_args(Placement)))))
    workers = chosen.get("num_workers", 1)
    if type(workers) is not int or workers < 1:
        raise ConfigError(refused("num_workers", workers, "an int of at least 1"))
    timeout = chosen.get("step_timeout", 1.0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise ConfigError(refused("step_timeout", timeout, "a positive number of seconds"))


def _check_options(target: str, make: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = inspect.signature(make).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters if each.name != "name"]
    for option in options:
        if option not in known:
            raise ConfigError(f"{target}: {unknown_name('option', option, known)}")
