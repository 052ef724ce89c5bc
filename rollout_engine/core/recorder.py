"""Recorders of a core: objects that are notified of all that happens to it, and how its entries are marked.

An entry is a method of `EngineCore` that changes it from outside. `@recorded_entry` marks it, and `ENTRIES` lists all.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from rollout_engine.base.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    SequenceEnd,
)
from rollout_engine.core import request

F = TypeVar("F", bound=Callable[..., Any])

ENTRIES: dict[str, Callable[..., Any]] = {}
"""The marked methods of `EngineCore` by name; without `step` and `add_request`, which have events of their own."""


class Recorder:
    """A recorder that ignores every event. Override the methods whose events it is to keep; they must not raise."""

    def record_call(self, name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Record that an entry of `ENTRIES` is called. It may still be refused."""

    def record_request(self, request: EngineCoreRequest) -> None:
        """Record a request that the core has accepted."""

    def begin_step(self) -> None:
        """Record that `EngineCore.step` is called."""

    def record_schedule(
        self, work: SchedulerOutput, rows: list[request.Sequence], sampled: list[request.Sequence]
    ) -> None:
        """Record a step that is submitted next. One call of `EngineCore.step` may submit several, or none.

        `rows`, `sampled`: the sequences of `work.scheduled` and of `work.samples`.
        """

    def record_result(self, result: ModelRunnerOutput | None, problem: BaseException | None) -> None:
        """Record the result of the oldest submitted step, or the error that fails it and all submitted after it."""

    def end_step(self, ended: Sequence[SequenceEnd], problem: BaseException | None) -> None:
        """Record that `EngineCore.step` returns, with the sequences that ended, or raises `problem`."""


def recorded_entry(method: F) -> F:
    """Mark a method of the core as an entry: recorders are notified of each call before it runs."""
    name = method.__name__

    @wraps(method)
    def record_and_call(core: Any, *arguments: Any, **options: Any) -> Any:
        for recorder in core.recorders:
            recorder.record_call(name, arguments, options)
        return method(core, *arguments, **options)

    ENTRIES[name] = record_and_call
    return cast(F, record_and_call)


def recorded_step(method: F) -> F:
    """Mark the core's `step`: recorders are notified before it runs and after it has returned or raised."""

    @wraps(method)
    def record_and_step(core: Any) -> EngineCoreOutputs:
        recorders: list[Recorder] = core.recorders
        for recorder in recorders:
            recorder.begin_step()
        try:
            outputs: EngineCoreOutputs = method(core)
        except BaseException as problem:
            for recorder in recorders:
                recorder.end_step((), problem)
            raise
        for recorder in recorders:
            recorder.end_step(outputs.ended or (), None)
        return outputs

    return cast(F, record_and_step)


def plain_arguments(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call of an entry in the order of its parameters, defaults filled in."""
    bound = signature(ENTRIES[name]).bind(None, *arguments, **options)
    bound.apply_defaults()
    return list(bound.arguments.values())[1:]


def call_entry(core: object, name: str, arguments: Sequence[Any]) -> None:
    """Call an entry with `plain_arguments`; trailing ones may be missing."""
    names = list(signature(ENTRIES[name]).parameters)[1:]
    ENTRIES[name](core, **dict(zip(names, arguments, strict=False)))
