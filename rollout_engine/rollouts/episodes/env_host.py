"""Hosts one environment: makes it, calls its methods, answers calls of its tools, and checks its results."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from envs_adapters.base import Action, EnvSpec, Observation
from rollout_engine.base.errors import error_text, text_of
from rollout_engine.rollouts.episodes.observations import ObservationError, as_num_seats, as_observation
from rollout_engine.rollouts.episodes.tool_functions import ToolFunction, tool_functions, tool_messages, tool_schemas

T = TypeVar("T")
Observed: TypeAlias = Observation | Awaitable[Observation]

_MAX_REASON_CHARACTERS = 500
_ARGUMENTS = {"reset": "the seed", "step": "the action"}
"""Methods of every environment -> their argument, in words."""


class Began(msgspec.Struct):
    """Result of a reset."""

    observation: Observation
    """Checked: `messages` is a text or a list of messages, `reward` a dict {seat: finite float}."""
    tools: list[dict[str, Any]]
    """JSON schemas of the environment's tools."""
    num_seats: int
    functions: list[str] = []
    """Names of the tools that are functions: their calls are made by the host."""


class EnvFailure(msgspec.Struct):
    """A call that failed; it takes the place of the call's result."""

    reason: str
    """One line: which method of which environment, and the exception or the deadline that passed."""
    exception: BaseException | None = None
    """None if no exception of this process describes it."""


class EnvHost:
    """The environment of one episode. Methods return a result, or an awaitable of it if the environment is async."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._env: Any = None
        self.is_async = False
        """Whether one of its methods is `async def` or has returned an awaitable: it belongs on an event loop."""
        self._functions: dict[str, ToolFunction] = {}
        self._tools: list[dict[str, Any]] = []
        self._num_seats, self._is_over = 1, False

    def reset(self, seed: int) -> Began | Awaitable[Began]:
        """Make the environment and start its episode."""
        env = self._env = self._spec()
        for name, argument in _ARGUMENTS.items():
            method = getattr(env, name, None)
            if not callable(method):
                raise ObservationError(f"{type(env).__name__} has no method '{name}': it is no environment.")
            _check_takes_one(method, f"{type(env).__name__}.{name}", argument)
            if inspect.iscoroutinefunction(method):
                self.is_async = True
        return self._then(env.reset(seed), self._begin)

    def step(self, action: Action) -> Observed:
        """Answer an action: calls of the environment's functions here, everything else by its `step`."""
        if self._is_over:
            raise ObservationError("the episode had ended before this step.")
        calls = action.tool_calls
        if not calls or not all(call.name in self._functions for call in calls):
            return self._step(action)
        return self._then(
            tool_messages(self._functions, calls),
            lambda messages: as_observation(Observation(messages, seat=action.seat), self._num_seats, action.seat),
        )

    @property
    def has_close(self) -> bool:
        """Whether there is an environment with a `close`, as far as it can be seen without an exception."""
        try:
            return callable(getattr(self._env, "close", None))
        except (Exception, SystemExit):  # a property, or `__getattr__`; the call raises it again and reports it
            return True

    def close(self) -> Any:
        """Call the environment's own `close` if it has one."""
        return self._env.close() if self.has_close else None

    def _begin(self, value: Any) -> Began:
        env = self._env
        self._num_seats = as_num_seats(getattr(env, "num_seats", 1))
        tools = list(getattr(env, "tools", None) or ())
        self._functions = tool_functions(tools)
        self._tools = tool_schemas(tools, self._functions)
        return Began(self._check_observation(value, None), self._tools, self._num_seats, list(self._functions))

    def _step(self, action: Action) -> Observed:
        return self._then(self._env.step(action), lambda value: self._check_observation(value, action.seat))

    def _check_observation(self, value: Any, seat: int | None) -> Observation:
        observation = as_observation(value, self._num_seats, seat)
        self._is_over = observation.terminated or observation.truncated
        return observation

    def _then(self, value: Any, go_on: Callable[[Any], T | Awaitable[T]]) -> T | Awaitable[T]:
        """`go_on(value)`, now or once an awaitable value is there."""
        if not inspect.isawaitable(value):
            return go_on(value)
        self.is_async = True
        return _await_both(value, go_on)


def _check_takes_one(method: Callable[..., Any], name: str, argument: str) -> None:
    try:
        signature = inspect.signature(method)
    except ValueError:  # a builtin without a signature: its call reports the error
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ObservationError(
            f"{name}{signature} is not allowed: it is called with one argument, {argument}."
        ) from None


def failure_of(what: str, problem: BaseException) -> EnvFailure:
    """The failure of `what`, for example "GuessNumber: step", with its exception as the reason."""
    if isinstance(problem, ObservationError):
        return EnvFailure(one_line(f"{what}: {problem}"), problem)
    return EnvFailure(one_line(f"{what} raised {error_text(problem)}"), problem)


def one_line(text: str) -> str:
    """The text on one line of at most 500 characters."""
    text = " ".join(text[: 4 * _MAX_REASON_CHARACTERS].split())
    return text if len(text) <= _MAX_REASON_CHARACTERS else text[: _MAX_REASON_CHARACTERS - 3] + "..."


def name_of_env(spec: EnvSpec) -> str:
    """The environment's name for messages."""
    factory = spec.factory
    if spec.name or isinstance(factory, str):
        return spec.name or str(factory)
    return str(getattr(factory, "__qualname__", "") or text_of(factory, repr))


async def _await_both(value: Awaitable[Any], go_on: Callable[[Any], T | Awaitable[T]]) -> T:
    result = go_on(await value)
    return await result if isinstance(result, Awaitable) else result
