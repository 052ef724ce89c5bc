"""Calling methods of worker extensions, and functions on the model, on an engine in this process."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import LifecycleError, RPCError, RPCTimeoutError
from rollout_engine.frontend.engine_lock import EngineLock
from rollout_engine.frontend.interrupts import allowed
from rollout_engine.frontend.lifecycle_control import LifecycleControl
from rollout_engine.frontend.spans import Spans


class Workers(Protocol):
    """What runs the calls: an executor."""

    def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Result of an extension's method on every rank, in order."""
        ...

    def runs_beside_steps(self, method: str) -> bool:
        """Whether a call of it runs while steps go on."""
        ...

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """Result of `fn` for the model of every rank."""
        ...

    @property
    def dirty(self) -> bool:
        """Whether the weights must not be used."""
        ...


class WorkerCalls:
    """The verbs of `WorkerVerbs`, over one executor. `lock` is held while a step runs."""

    def __init__(
        self, core: EngineCore, workers: Workers, control: LifecycleControl, lock: EngineLock, spans: Spans
    ) -> None:
        self._core, self._workers, self._control, self._lock, self._spans = core, workers, control, lock, spans

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        """See `WorkerVerbs.collective_rpc`."""
        call = checked_call(method, timeout, args, kwargs)
        with self._spans.during("collective_rpc", method=method):
            return self._run(*call) if timeout is None else self._run_in_time(timeout, *call)

    def _run_in_time(self, timeout: float, method: str, *arguments: Any) -> list[Any]:
        future: Future[list[Any]] = Future()
        thread = threading.Thread(
            target=self._resolve, args=(future, method, *arguments), name=f"rpc-{method}", daemon=True
        )
        thread.start()
        done, _ = wait([future], timeout)
        if not done:
            raise timed_out(method, timeout, begun=not future.cancel())
        return future.result()

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """See `WorkerVerbs.apply_model`."""
        with self._lock:
            lifecycle = self._core.lifecycle
            lifecycle.require_weights("apply_model")
            if lifecycle.updating:
                raise LifecycleError("apply_model: not possible while the engine is UPDATING: wait until it has ended.")
            with self._control.updating(lambda: self._workers.dirty), allowed():
                return self._workers.apply_model(fn)

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        with self._place_for(method):
            return self._workers.collective_rpc(method, args, kwargs)

    @contextmanager
    def _place_for(self, method: str) -> Iterator[None]:
        """Between two steps, unless it runs beside them."""
        with self._lock:
            self._core.lifecycle.require_alive("collective_rpc")
            beside = self._workers.runs_beside_steps(method)
            if not beside:
                with allowed():  # a method may take its time
                    yield
        if beside:
            yield

    def _resolve(self, future: Future[list[Any]], method: str, *arguments: Any) -> None:
        with self._place_for(method):
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._workers.collective_rpc(method, *arguments))
            except BaseException as error:
                future.set_exception(error)


class Calls(Protocol):
    """What carries out the verbs of `WorkerVerbs`."""

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        """See `WorkerVerbs.collective_rpc`."""
        ...

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """See `WorkerVerbs.apply_model`."""
        ...


class WorkerVerbs(ABC):
    """What every engine and policy in this process lets its user do with the workers."""

    @property
    @abstractmethod
    def worker_calls(self) -> Calls:
        """What carries them out."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of a worker extension (`worker_ext.base`) on every rank, between two steps.

        Returns one result per rank, in order. `timeout` in seconds: `RPCTimeoutError` after it; a call that had begun
        goes on to its end, and steps wait for it. Raises `RPCError`, nothing run, for a method that does not exist or
        arguments that are not of its types; our own errors as the method raised them; any other as `RPCError` with
        rank and traceback.
        """
        return self.worker_calls.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """Results of `fn(module)` for the module of every rank, between two steps. It may read weights, not write them.

        Raises what `fn` raises; `LifecycleError` and `DirtyWeightsError` where there are no weights to read.
        `DirtyWeightsError` too where `fn` wrote to some: then the engine is DIRTY until a complete update. (A write
        through `.data` goes unnoticed.)
        """
        return self.worker_calls.apply_model(fn)


def checked_call(
    method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[str, list[Any], dict[str, Any]]:
    """The call, if it can be one: a name, positional and named arguments, a deadline. Raises `RPCError`."""
    wrong = None
    if not isinstance(method, str):
        wrong = f"method must be a name (a str), not {method!r:.80}; for a function on the model there is apply_model"
    elif not isinstance(args, list | tuple):
        wrong = f"args must be a list or a tuple, not {args!r:.80}"
    elif not (kwargs is None or isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)):
        wrong = f"kwargs must be a dict of names, not {kwargs!r:.80}"
    elif timeout is not None and not (isinstance(timeout, int | float) and timeout > 0 and math.isfinite(timeout)):
        wrong = f"timeout must be seconds, more than 0, or None; not {timeout!r:.80}"
    if wrong:
        raise RPCError(f"collective_rpc: {wrong}.", method=str(method)[:80])
    return method, list(args), dict(kwargs or {})


def timed_out(method: str, timeout: float, *, begun: bool | None) -> RPCTimeoutError:
    """`begun` None: nobody here knows."""
    what = {True: "it goes on to its end, and steps wait for it", False: "it had not begun, and never will"}
    fate = what.get(begun, "if it has begun, it goes on to its end")  # type: ignore[call-overload]
    return RPCTimeoutError(f"{method}: no result within {timeout:g} s; {fate}.", method=method)
