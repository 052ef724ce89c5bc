"""A verb: an operation of an engine other than generating, such as a pause. All are in `rollout_engine.engine.verbs`.

face         blocking(verb) | awaitable(verb)   binds the arguments
client       call(name, arguments)              checks their types; they may cross to another process
driver       run(call)                          runs the verb's function: between two steps, unless it runs any time
"""

import inspect
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from rollout_engine.base.class_names import function_name
from rollout_engine.base.errors import CallTimeoutError, RequestError, RolloutEngineError, refused
from rollout_engine.base.metrics import CoreStats
from rollout_engine.base.structs import arguments_struct
from sync.described_types import describe_types

When = Literal["between steps", "any time", "at once"]
"""When a verb may run. "any time": it only reads a value or two, and in process does not wait for the step in progress.
"at once": nor does it in another process, or for earlier messages of its client."""
Arguments = dict[str, Any]
_GRACE_SECONDS = 1.0
P = ParamSpec("P")
R = TypeVar("R")


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the verb table."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    """Signature as users call the verb: without the driver."""
    arguments: type[msgspec.Struct]
    """Struct that arguments are checked against."""
    result: Any
    """Type of the result."""
    when: When = "between steps"
    in_pieces: bool = False
    """The function is a generator function, and steps run between two `next` of it; it yields nothing."""
    beside_steps: Callable[[Any, Arguments], bool] | None = None
    """Whether this call is long work that runs on a thread of its own while steps continue."""
    until: Callable[[Any], bool] | None = None
    """The call ends after the first step that finds this true of the driver; None: at once."""
    timeout: str = ""
    """Name of the argument for the seconds that a caller waits for the result; by default "timeout", if there is
    one.

    Every verb that users call has one, and its default is None, which is no limit of the caller's own: before a verb
    begins, it waits for earlier work of others, such as the commit of a large model or a method of an extension, and no
    number of seconds is too long for all of these. Endless work is ended elsewhere: each step and each call by
    `EngineConfig.step_deadline`, and a core that dies or hangs ends every wait (`EngineDeadError`). "": the caller
    waits by a deadline of another kind, such as that of the weight update that the call belongs to.
    """
    late: Callable[..., RolloutEngineError] | None = None
    """Makes the error of a call that took longer, `late(arguments, begun)`; None: a `CallTimeoutError`."""
    prepare: Callable[..., Arguments] | None = None
    """Converts the caller's arguments to those that are sent, in the caller's process; raises for wrong ones."""
    after_shutdown: bool = False
    """Whether it still answers after shutdown, if the core is in this process: it only reads numbers."""
    public: bool = True
    """Whether faces have a method of this name."""
    public_name: str = ""
    """Name of the method that users call for it, if that has another name; errors begin with it."""
    crosses: bool = True
    """Whether arguments and result can cross to another process."""
    combine: Callable[[Sequence[Any]], Any] | None = None
    """Makes a fleet's result of those of its engines, in order; None: any one engine answers for all."""
    needs_all: bool = False
    """Whether a fleet's call fails if an engine is lost before it has answered."""
    span: str = ""
    """Name of the tracing span around a call, if there is one."""
    span_arguments: Sequence[str] = ()
    """Arguments shown in the span."""
    observe: Callable[[CoreStats, float], None] | None = None
    """Takes the seconds of a completed call into the core's metrics."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Bind the arguments of a call to names. Raises `TypeError` as Python does, and any error of `prepare`."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as problem:
            raise TypeError(f"{self.name}() {problem}") from None
        bound.apply_defaults()
        return bound.arguments if self.prepare is None else self.prepare(**bound.arguments)

    def bind_arguments(self, arguments: Mapping[str, Any]) -> Arguments:
        """Arguments of the declared types. Raises `RequestError`."""
        if not self.crosses:
            return dict(arguments)
        try:
            checked = msgspec.convert(arguments, self.arguments)
        except (msgspec.ValidationError, OverflowError) as problem:
            raise RequestError(f"{self.name}: {problem}.", field="arguments") from None
        return {name: getattr(checked, name) for name in self.arguments.__struct_fields__}

    def title(self, arguments: Mapping[str, Any]) -> str:
        """Name of the verb for errors; for `collective_rpc` that of the method."""
        return function_name(arguments.get("method", self.name))

    def seconds(self, arguments: Mapping[str, Any]) -> float | None:
        """How long the caller waits; None: indefinitely. Raises `RequestError` for a value that is no number."""
        if not self.timeout:
            return None
        seconds = arguments.get(self.timeout, self.signature.parameters[self.timeout].default)
        if seconds is None:
            return None
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds):
            problem = refused(self.timeout, seconds, "a number of seconds")
            raise RequestError(f"{self.name}: {problem}", field=self.timeout, value=seconds)
        return min(max(seconds, 0.0), threading.TIMEOUT_MAX - _GRACE_SECONDS)

    @property
    def takes_steps(self) -> bool:
        """Whether a call may end with a later step than the one that it begins before."""
        return self.in_pieces or self.until is not None

    def patience(self, arguments: Mapping[str, Any]) -> float | None:
        """How long a caller waits before it gives up: the driver itself ends a late call that waits for steps."""
        seconds = self.seconds(arguments)
        return seconds + _GRACE_SECONDS if seconds is not None and self.takes_steps else seconds

    def too_late(self, arguments: Arguments, *, begun: bool) -> RolloutEngineError:
        """The error of a call whose time is over. `begun` False: it had not begun, and never will."""
        if self.late is not None:
            return self.late(arguments, begun)
        fate = "if it has begun it goes on to its end" if begun else "it had not begun, and never will"
        advice = "check_health() says how long the engine has been busy"
        return CallTimeoutError(f"{self.name}: no result within {arguments[self.timeout]:g} s; {fate}. {advice}.")


def verb_of(function: Callable[..., Any], **options: Any) -> Verb:
    """Make the verb that `function` carries out. Its first parameter is the driver; `options` are `Verb`'s."""
    hints = get_type_hints(function)
    options.setdefault("timeout", "timeout" if "timeout" in hints else "")
    _, *parameters = inspect.signature(function).parameters.values()
    sent = {name: _on_the_wire(hint) for name, hint in hints.items()}
    arguments = arguments_struct(function.__name__, parameters, sent)
    if options.get("crosses", True):
        describe_types(arguments)
    return Verb(
        name=function.__name__,
        function=function,
        signature=inspect.Signature(parameters),
        arguments=arguments,
        result=_get_awaited_type(hints["return"]),
        **options,
    )


def _on_the_wire(hint: Any) -> Any:
    """The type an argument is sent as: a choice of names is text, since the core's own error lists the names best."""
    return str if get_origin(hint) is Literal else hint


def _get_awaited_type(hint: Any) -> Any:
    """Type of the result that callers get: that of a future or of a generator."""
    kinds = {Future: 0, Generator: 2}
    return get_args(hint)[kinds[get_origin(hint)]] if get_origin(hint) in kinds else hint
