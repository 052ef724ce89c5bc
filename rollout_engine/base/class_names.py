"""Names of the user's classes, "package.module:Class", by which the engine imports them, also in another process.

A core in a process of its own cannot see the program that started it. A class in `__main__` is named by the program's
file there, which is imported (never run as the program).
"""

import importlib
import importlib.util
import os
import sys
from functools import reduce
from pathlib import Path
from typing import Any

from rollout_engine.base.errors import ConfigError

_PROGRAM = ("__main__", "__mp_main__")
"""Names of the program's own module; the second in processes that `multiprocessing` has spawned."""


def name_of(kind: type, field: str) -> str:
    """Return "module:Class". Raises `ConfigError` naming the option `field` if the class is not found by that name."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = find_class(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not kind:
        raise ConfigError(
            f"{field}: '{name}' is not found under that name, by which the engine imports it: define the class at the "
            "top level of a module."
        )
    return name


def find_class(name: str) -> Any:
    """Import a class by its name. Raises `ValueError` for another form than "module:Class", and any import error."""
    module, _, path = name.partition(":")
    if not (module and all(part.isidentifier() for part in path.split("."))):
        raise ValueError("must be of the form 'package.module:Class'")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def name_elsewhere(name: str, field: str) -> str:
    """The name by which another process with the same `sys.path` finds the class. Raises `ConfigError` if it cannot."""
    module, _, path = name.partition(":")
    if module not in _PROGRAM:
        return name
    main = sys.modules[module]
    if main.__spec__ is not None:  # python -m package.module
        return f"{main.__spec__.name}:{path}"
    file = getattr(main, "__file__", None)
    if file is None or not os.path.exists(file):  # <stdin>
        raise ConfigError(
            f"{field}: '{name}' is defined at a prompt or in a notebook, which the core's process cannot import: put "
            "the class into a file, or use an engine in this process (LLM, RolloutPolicy)."
        )
    if not _is_found_as(Path(file).stem, file):
        raise ConfigError(
            f"{field}: '{name}' is defined in {file}, which the core's process cannot import as '{Path(file).stem}': "
            "put the class into a module of its own beside it."
        )
    return f"{Path(file).stem}:{path}"


def import_path() -> list[str]:
    """`sys.path` as another process can use it."""
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]


def _is_found_as(module: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def function_name(function: object) -> str:
    """The name of a function or any other callable, for errors; a text is a name already."""
    return (
        function if isinstance(function, str) else str(getattr(function, "__qualname__", type(function).__qualname__))
    )
