"""Refuses keyword arguments that a method does not have by the typed error, which names the nearest one it has."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rollout_engine.base.errors import RequestError, unknown_name


def check_methods(kind: type) -> None:
    """Wrap the public methods that `kind` itself defines, in place: unknown keyword arguments raise `RequestError`.

    Those that take any keyword check theirs themselves.
    """
    for name, function in list(vars(kind).items()):
        if not name.startswith("_") and inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            if not any(each.kind == each.VAR_KEYWORD for each in parameters):
                setattr(kind, name, _checked(name, function))


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    known = list(inspect.signature(function).parameters)[1:]
    names = frozenset(known)

    def check(given: dict[str, Any]) -> None:
        for key in given.keys() - names:
            raise RequestError(unknown_name(f"argument of {name}", key, known), field=key, value=given[key])

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(self: object, /, *args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return await function(self, *args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(self: object, /, *args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return function(self, *args, **kwargs)

    return called
