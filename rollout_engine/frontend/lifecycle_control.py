"""Pausing, sleeping and waking an engine in this process, from any thread."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.lifecycle import PauseMode, State
from rollout_engine.errors import DrainTimeoutError
from rollout_engine.frontend.engine_lock import EngineLock
from rollout_engine.frontend.spans import Spans
from rollout_engine.messages import EngineCoreOutputs, KvMode, UpdateMode

PAUSED_POLL_SECONDS = 0.05
"""How long a call in progress sleeps at a time while paused: a change wakes it at once, an interrupt within this."""

_GIVE_WAY_SECONDS = 1.0
"""How long a step waits at most for a thread that wants to go first."""


class LifecycleControl:
    """The verbs of `LifecycleVerbs`, over one core.

    Args:
        core: whose lifecycle it is.
        lock: held while a step runs; every verb takes it.
        step: runs one step under the lock and keeps what it brought for the next caller of the engine's `step`.
        deliver: takes ends that no step brought.
        spans: are told of pauses.
    """

    def __init__(
        self,
        core: EngineCore,
        lock: EngineLock,
        *,
        step: Callable[[], None],
        deliver: Callable[[EngineCoreOutputs], None],
        spans: Spans,
    ) -> None:
        self._core, self._spans = core, spans
        self._changed = threading.Condition(lock)  # type: ignore[arg-type]  # it is all that one asks of a lock
        self._entered = threading.Event()
        """Clear while a thread waits for the lock to change something."""
        self._entered.set()
        self._step = step
        self._deliver = deliver

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See `LifecycleVerbs.pause_generation`."""
        start = time.perf_counter()
        with self._spans.during("pause", mode=mode):
            with self._change():
                self._deliver(self._core.pause(mode, clear_cache=clear_cache))
            self._drain()
        with self._changed:
            self._core.stats.add_pause(time.perf_counter() - start)

    def resume(self) -> None:
        """See `LifecycleVerbs.resume_generation`."""
        with self._change():
            self._core.resume()

    def is_paused(self) -> bool:
        """See `LifecycleVerbs.is_paused`."""
        self._core.lifecycle.require_alive("is_paused")
        return self._core.lifecycle.paused is not None

    def sleep(self, level: int, mode: PauseMode) -> None:
        """See `LifecycleVerbs.sleep`."""
        with self._change():
            self._deliver(self._core.sleep(level, mode))
        self._drain()

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """See `LifecycleVerbs.wake_up`."""
        with self._change():
            self._core.wake_up(tags)

    def is_sleeping(self) -> bool:
        """See `LifecycleVerbs.is_sleeping`."""
        self._core.lifecycle.require_alive("is_sleeping")
        return bool(self._core.lifecycle.asleep)

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """See `LifecycleVerbs.reset_prefix_cache`."""
        with self._changed:
            return self._core.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def wait_for_drain(self, timeout: float, verb: str = "wait_for_requests_to_drain") -> None:
        """See `LifecycleVerbs.wait_for_requests_to_drain`."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                num_in_flight = self._core.num_draining(verb)
                if not num_in_flight:
                    return
                if time.monotonic() >= deadline:
                    what = f"{num_in_flight} requests are still in flight after {timeout:g} seconds"
                    raise DrainTimeoutError(f"{verb}: {what}; they go on.")
                self._step()

    def give_way(self) -> None:
        """Let a thread that waits to change something go before the next step: a lock does not know who came first."""
        self._entered.wait(_GIVE_WAY_SECONDS)

    def wait_until_steppable(self, timeout: float) -> None:
        """Return once a step can compute, or something else has changed, or after `timeout` seconds."""
        if not self._core.lifecycle.can_step:
            with self._changed:
                if not self._core.lifecycle.can_step:
                    self._changed.wait(timeout)

    def require_step(self) -> None:
        """Raise `DirtyWeightsError` for a step that cannot go on with what there is before an update comes."""
        if self._core.lifecycle.state is State.DIRTY and self._core.num_unfinished_requests:
            self._core.lifecycle.require_clean("step")

    @contextmanager
    def updating(self, is_dirty: Callable[[], bool]) -> Iterator[None]:
        """Around one weight update: UPDATING, then the state before, or DIRTY where `is_dirty` says so."""
        with self._changed:
            self._core.begin_update()
        try:
            yield
        finally:
            with self._change():
                self._core.end_update(dirty=is_dirty())

    @contextmanager
    def boundary(self) -> Iterator[None]:
        """Keeps steps out, with none in flight; afterwards whoever waits for a change looks again."""
        with self._change():
            self._core.quiesce()
            yield

    def settle(self, mode: UpdateMode, deadline: float) -> None:
        """End or finish what is in flight, before an update; see `StepSide.settle`."""
        if mode == "keep":
            return
        with self._change():
            self._deliver(self._core.close_for_update(mode))
        if mode == "wait":
            self.wait_for_drain(deadline - time.monotonic(), "update_weights")

    def shutdown(self) -> None:
        """No verb works any more; whoever waits is told."""
        with self._change():
            self._core.shutdown()

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._entered.clear()
        try:
            self._changed.acquire()
        finally:
            self._entered.set()
        try:
            yield
        finally:
            self._changed.notify_all()
            self._changed.release()

    def _drain(self) -> None:
        """Step until nothing drains. Others may step as well: each step is under the lock, and loses no result."""
        while True:
            with self._changed:
                if not self._core.lifecycle.draining:
                    return
                self._step()


class UpdateSteps:
    """The steps of one engine, for one update of its weights."""

    def __init__(self, core: EngineCore, control: LifecycleControl, kv: KvMode) -> None:
        self._core, self._kv = core, kv
        self.settle, self.boundary = control.settle, control.boundary

    def stop(self) -> None:
        """Let no step begin before the update has ended. Called inside `boundary`."""
        self._core.lifecycle.stop_for_update()

    def advance(self, version: int) -> int:
        """Make `version` the live one; returns the number of requests in flight. Called inside `boundary`."""
        return self._core.commit_version(version, self._kv)
