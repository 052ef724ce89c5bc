"""Names the factory of environments so that another process finds it, and finds it there."""

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

import msgspec

from envs_adapters.base import EnvSpec, load
from rollout_engine.base.class_names import import_path
from rollout_engine.base.errors import ConfigError

WORKER_MODULE = "rollout_engine.rollouts.episodes.env_worker"
_PROGRAM = "__main__"
_PROGRAM_ELSEWHERE = "__mp_main__"
"""Name under which `multiprocessing`, too, imports the program's file in its processes."""
_MAIN_KEYS = ("init_main_from_name", "init_main_from_path")


class FactoryReference(msgspec.Struct, frozen=True):
    """The data that another process needs to make the environments of an `EnvSpec`."""

    factory: str
    """"module:attribute"."""
    arguments: dict[str, Any]
    name: str
    sys_path: list[str]
    sys_argv: list[str]
    program: dict[str, str]
    """How to import the program, if it defines the factory: keys of `multiprocessing.spawn.prepare`."""


def refer_to(spec: EnvSpec) -> FactoryReference:
    """Refer to a spec's factory. Raises `ConfigError` for one, or arguments, that another process could not have."""
    if getattr(getattr(sys.modules[_PROGRAM], "__spec__", None), "name", "") == WORKER_MODULE:
        advice = 'put what the program runs under `if __name__ == "__main__":`'
        raise ConfigError(f"env: environments are started where a worker process imports the program: {advice}.")
    name = spec.factory if isinstance(spec.factory, str) else _name(spec.factory)
    program = {}
    if name.partition(":")[0] == _PROGRAM:
        name, program = name.replace(_PROGRAM, _PROGRAM_ELSEWHERE, 1), _program(name)
    return FactoryReference(name, _arguments(spec), spec.name, import_path(), list(sys.argv), program)


def find(reference: FactoryReference) -> EnvSpec:
    """The spec in this process; imports the factory's module. Raises the errors of that import."""
    spawn.prepare({"sys_path": reference.sys_path, "sys_argv": reference.sys_argv, **reference.program})
    importlib.invalidate_caches()
    return EnvSpec(load(reference.factory), reference.arguments, reference.name)


def changed_source(since: float) -> str:
    """A file of a module imported here that has been written after `since`, a time of `time.time`; "" for none."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__") or ""
        with suppress(OSError, TypeError):
            if os.stat(path).st_mtime > since:
                return str(path)
    return ""


def _name(factory: Callable[..., Any]) -> str:
    module, path = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if not module or not path:
        kind = type(factory).__name__
        advice = "give the class or function itself, and its arguments as options of make_env"
        raise ConfigError(f"env: worker processes cannot import a {kind}: {advice}, or use placement='threads'.")
    name = f"{module}:{path}"
    try:
        found = load(name)
    except (ImportError, AttributeError):
        found = None
    if found is not factory:
        advice = "define it at the top level of a module, or use placement='threads'"
        raise ConfigError(f"env: worker processes cannot import '{name}': {advice}.")
    return name


def _program(name: str) -> dict[str, str]:
    data = spawn.get_preparation_data("environments")
    found = {key: data[key] for key in _MAIN_KEYS if key in data}
    path = found.get("init_main_from_path")
    if not found or (path is not None and not os.path.exists(path)):
        advice = "put it into a file of its own and import it, or use placement='threads'"
        raise ConfigError(f"env: '{name}' is defined at a prompt, where worker processes cannot import it: {advice}.")
    return found


def _arguments(spec: EnvSpec) -> dict[str, Any]:
    sent: dict[str, Any] = {}
    for name, value in spec.arguments.items():
        try:
            sent[name] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as problem:
            advice = "give plain data, such as the path of a file, or use placement='threads'"
            raise ConfigError(f"env: {name} cannot be sent to worker processes ({problem}): {advice}.") from problem
        if sent[name] != value:
            what = f"{name}={value!r:.80} would arrive in worker processes as {sent[name]!r:.80}"
            raise ConfigError(f"env: {what}: give that, or use placement='threads'.")
    return sent
