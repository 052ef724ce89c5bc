"""Every verb of an engine, written once: what it is called, takes, gives, does, and when it may run.

Clients call them by name, the driver runs them, and every face has a method for each public one
(`rollout_engine.faces.verb_methods`). Arguments are checked against the annotations. Each function runs inside the
driver's lock, between two steps, unless its row of the table says otherwise; every verb raises `LifecycleError`, naming
state and verb, where it is out of order, and after shutdown.

`timeout`, or `drain_timeout` where the wait is for requests, is in seconds; None: as long as the engine is busy with
what came before (`Verb.timeout` says why that is the default, and what ends it). After it a verb raises
`CallTimeoutError`, a `TimeoutError`: a call that has not begun by then never does.

Pausing, resuming, sleeping and waking are idempotent. While the engine does not run, calls that block until their
requests are complete (`LLM.generate`, `RolloutPolicy.rollout`) refuse to start; those in progress wait.
"""

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from rollout_engine._structs import plain
from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.health import Health
from rollout_engine.engine.interrupts import allowed
from rollout_engine.engine.scored_pairs import score_pairs
from rollout_engine.engine.verb import Arguments, VerbTable
from rollout_engine.errors import (
    CallTimeoutError,
    DrainTimeoutError,
    LifecycleError,
    RequestError,
    RolloutEngineError,
    RPCError,
    RPCTimeoutError,
    refused,
)
from rollout_engine.metrics import CoreMetrics, CoreStats

VERBS = VerbTable()


def _late_drain(verb: str, effect: str = "") -> Callable[[Arguments, bool], RolloutEngineError]:
    """Make the error of a call that waits for requests in flight for too long. `effect`: what the call does to them."""

    def late(arguments: Arguments, begun: bool) -> RolloutEngineError:
        what = f"requests are still in flight after {arguments['drain_timeout']:g} seconds"
        fate = effect if begun else "; the call had not begun, and never will"
        return DrainTimeoutError(f"{verb}: {what}; they go on{fate}.")

    return late


@VERBS.add(
    combine=combine.nothing,
    until=EngineDriver.is_drained,
    timeout="drain_timeout",
    late=_late_drain("pause_generation", ", and the engine pauses after them: resume_generation() calls that off"),
    span="pause",
    span_arguments=("mode",),
    observe=CoreStats.add_pause,
)
def pause_generation(
    driver: EngineDriver,
    *,
    mode: PauseMode = "abort",
    clear_cache: bool = False,
    wait_for_inflight_requests: bool | None = None,
    drain_timeout: float | None = None,
) -> None:
    """Stop computing at a step boundary; returns when that is so. Its seconds are in `stats.last_pause_seconds`.

    Args:
        mode: "abort" ends requests in flight with the tokens they have; "wait" finishes them first (in process this
            call steps the engine, as others may); "keep" freezes them with their KV, and they go on at
            `resume_generation`.
        clear_cache: forget every known prefix too; frozen requests compute their KV again.
        wait_for_inflight_requests: True is the older spelling of mode="wait".
        drain_timeout: seconds that mode="wait" waits at most; then `DrainTimeoutError` (a `TimeoutError`) is raised,
            and the engine pauses once the requests have ended, unless it is resumed before. None: as long as they take.

    New requests wait for `resume_generation`, or are turned away, by `EngineConfig.admission`.
    """
    mode = "wait" if wait_for_inflight_requests else mode
    driver.deliver(driver.core.pause(mode, clear_cache=clear_cache))


@VERBS.add(combine=combine.nothing)
def resume_generation(driver: EngineDriver, *, timeout: float | None = None) -> None:
    """Go on after a pause."""
    driver.core.resume()


@VERBS.add(when="any time", combine=all)
def is_paused(driver: EngineDriver, *, timeout: float | None = None) -> bool:
    """Whether a pause is in force (also while asleep)."""
    return driver.core.lifecycle.paused is not None


@VERBS.add(
    combine=combine.nothing,
    until=EngineDriver.is_idle,
    timeout="drain_timeout",
    late=_late_drain("wait_for_requests_to_drain"),
)
def wait_for_requests_to_drain(driver: EngineDriver, drain_timeout: float = 300) -> None:
    """Return when the core has nothing in flight, of any client. In process this call steps the engine.

    Raises `DrainTimeoutError` (a `TimeoutError`) after `drain_timeout` seconds, `LifecycleError` when requests are
    frozen and so cannot finish. Requests that wait for resume or wake-up do not count.
    """


@VERBS.add(
    combine=combine.nothing,
    until=EngineDriver.is_drained,
    timeout="drain_timeout",
    late=_late_drain("sleep", ", and the engine falls asleep after them: abort them to have that sooner"),
)
def sleep(
    driver: EngineDriver, level: int = 1, mode: PauseMode = "abort", *, drain_timeout: float | None = None
) -> None:
    """Give memory back to the system.

    Args:
        level: 1 releases the KV pool and what is derived from the weights; 2 forgets the weights too, and after
            `wake_up` a complete `update_weights` has to come first.
        mode: of requests in flight, as for `pause_generation`. Those kept compute their KV again after `wake_up`.
        drain_timeout: as for `pause_generation`; the engine falls asleep once the requests have ended.
    """
    driver.deliver(driver.core.sleep(level, mode))


def _prepare_wake_up(tags: Iterable[str] | None, timeout: float | None) -> Arguments:
    return {"tags": tags if tags is None or isinstance(tags, str) else list(tags), "timeout": timeout}


@VERBS.add(prepare=_prepare_wake_up, combine=combine.nothing)
def wake_up(driver: EngineDriver, tags: str | list[str] | None = None, *, timeout: float | None = None) -> None:
    """Take memory back: "weights", "kv_cache", or None for all. A pause from before the sleep still holds."""
    driver.core.wake_up(tags)


@VERBS.add(when="any time", combine=any)
def is_sleeping(driver: EngineDriver, *, timeout: float | None = None) -> bool:
    """Whether some memory is still released."""
    return bool(driver.core.lifecycle.asleep)


@VERBS.add(combine=all)
def reset_prefix_cache(
    driver: EngineDriver, reset_running_requests: bool = False, *, timeout: float | None = None
) -> bool:
    """Forget every known prefix, and return whether that was done.

    It is refused (False, nothing changed) while requests in flight hold KV blocks, unless `reset_running_requests`:
    then they compute their KV again, to the same tokens.
    """
    return driver.core.reset_prefix_cache(reset_running_requests=reset_running_requests)


def _prepare_score(
    prompt_token_ids: Sequence[Sequence[int]],
    completion_token_ids: Sequence[Sequence[int]],
    temperature: float,
    timeout: float | None,
) -> Arguments:
    return {
        "prompt_token_ids": plain(list(prompt_token_ids)),
        "completion_token_ids": plain(list(completion_token_ids)),
        "temperature": plain(temperature),
        "timeout": plain(timeout),
    }


def _late_score(arguments: Arguments, begun: bool) -> RolloutEngineError:
    what = f"{len(arguments['completion_token_ids'])} completions were not scored within {arguments['timeout']:g} s"
    return CallTimeoutError(f"score: {what}; what is left of them never will be. Give fewer at a time, or more time.")


@VERBS.add_in_pieces(prepare=_prepare_score, late=_late_score)
def score(
    driver: EngineDriver,
    prompt_token_ids: Sequence[list[int]],
    completion_token_ids: Sequence[list[int]],
    *,
    temperature: float = 1.0,
    timeout: float | None = None,
) -> Generator[None, None, list[np.ndarray]]:
    """Log-probs of given completions under the live weights: per sequence float32 [len(completion)].

    They are what sampling those tokens at `temperature` would have returned ("tempered"). Steps of requests run between
    two batches of sequences; weights are those of the beginning to the end. Raises `RequestError`, and after `timeout`
    seconds `CallTimeoutError` (a `TimeoutError`).
    """
    require_weights = partial(driver.core.lifecycle.require_weights, "score")
    return score_pairs(driver.executor, prompt_token_ids, completion_token_ids, temperature, require_weights)


def _prepare_rpc(
    method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Arguments:
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
    return {"method": method, "timeout": timeout, "args": list(args), "kwargs": dict(kwargs or {})}


def _rpc_late(arguments: Arguments, begun: bool) -> RolloutEngineError:
    method, timeout = arguments["method"], arguments["timeout"]
    fate = (
        "if it has begun it goes on to its end, and steps wait for it" if begun else "it had not begun, and never will"
    )
    return RPCTimeoutError(f"{method}: no result within {timeout:g} s; {fate}.", method=method)


def _runs_beside_steps(driver: EngineDriver, arguments: Arguments) -> bool:
    driver.core.lifecycle.require_alive("collective_rpc")
    return driver.executor.runs_beside_steps(arguments["method"])


@VERBS.add(
    prepare=_prepare_rpc,
    combine=combine.end_to_end,
    needs_all=True,
    beside_steps=_runs_beside_steps,
    late=_rpc_late,
    span="collective_rpc",
    span_arguments=("method",),
)
def collective_rpc(
    driver: EngineDriver,
    method: str,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call a method of a worker extension (`worker_ext.base`) on every rank, between two steps.

    Returns one result per rank, in order. `timeout` in seconds: `RPCTimeoutError` after it; a call that had begun goes
    on to its end, and steps wait for it. Raises `RPCError`, nothing run, for a method that does not exist or arguments
    that are not of its types; our own errors as the method raised them; any other as `RPCError` with rank and
    traceback.

    To an engine in another process arguments and results are numbers, text, lists, dicts, arrays and tensors: these
    travel without a copy, structs arrive as dicts and tuples as lists. `RPCError` names what cannot travel.
    """
    with allowed():  # a method may take its time
        return driver.executor.collective_rpc(method, args, kwargs or {}, caller=driver.caller)


@VERBS.add(crosses=False)
def apply_model(driver: EngineDriver, fn: Callable[[nn.Module], Any], *, timeout: float | None = None) -> list[Any]:
    """Results of `fn(module)` for the module of every rank, between two steps. It may read weights, not write them.

    In process only. Raises what `fn` raises; `LifecycleError` and `DirtyWeightsError` where there are no weights to
    read. `DirtyWeightsError` too where `fn` wrote to some: then the engine is DIRTY until a complete update. (A write
    through `.data` goes unnoticed.)
    """
    lifecycle = driver.core.lifecycle
    lifecycle.require_weights("apply_model")
    if lifecycle.updating:
        raise LifecycleError("apply_model: not possible while the engine is UPDATING: wait until it has ended.")
    driver.core.begin_update("apply_model")
    try:
        with allowed():
            return driver.executor.apply_model(fn)
    finally:
        driver.core.end_update(dirty=driver.executor.dirty)


@VERBS.add()
def get_model_metadata(driver: EngineDriver, *, timeout: float | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every weight."""
    return driver.executor.metadata()


@VERBS.add(when="any time", after_shutdown=True, combine=combine.mean)
def get_cache_usage(driver: EngineDriver, *, timeout: float | None = None) -> float:
    """KV blocks referenced by live requests / all blocks."""
    return driver.core.cache_usage()


@VERBS.add(when="any time", after_shutdown=True, combine=sum)
def get_num_unfinished_requests(driver: EngineDriver, *, timeout: float | None = None) -> int:
    """Requests of all clients that the core has not ended."""
    return driver.core.num_unfinished_requests


@VERBS.add(when="at once", combine=combine.health)
def check_health(driver: EngineDriver, *, timeout: float | None = None) -> Health:
    """Ask the engine for a sign of life, which comes during a step too. Raises `EngineDeadError` when it is gone."""
    lifecycle, work = driver.core.lifecycle, driver.work
    return Health(
        state="ENDING" if driver.is_ending else str(lifecycle.state),
        is_ready=lifecycle.admits and not driver.is_ending,
        busy_seconds=0.0 if work is None else max(time.monotonic() - work.start, 0.0),
        pid=os.getpid(),
        policy_version=driver.core.policy_version,
        num_unfinished_requests=driver.core.num_unfinished_requests,
        num_steps=driver.core.stats.num_steps,
        io=driver.io_stats,
        stuck=driver.stuck,
    )


@VERBS.add(after_shutdown=True, combine=combine.nothing)
def check_integrity(driver: EngineDriver, *, timeout: float | None = None) -> None:
    """Recount requests, blocks and references from scratch; AssertionError says what is off."""
    driver.core.check_integrity()


def _prepare_profile(directory: object, **options: Any) -> Arguments:
    if directory and isinstance(directory, str | os.PathLike):
        directory = os.path.abspath(directory)  # here: the engine's process may be in another directory
    return {"directory": directory, **options}


@VERBS.add(prepare=_prepare_profile, combine=combine.nothing, needs_all=True)
def start_profile(
    driver: EngineDriver,
    directory: str | None = None,
    *,
    num_steps: int | None = None,
    with_stack: bool = False,
    record_shapes: bool = False,
    profile_memory: bool = False,
    timeout: float | None = None,
) -> None:
    """Begin to record what the process that runs the model does, by torch's profiler; `stop_profile` ends it.

    Steps are slower meanwhile, and what is recorded stays in memory: profile seconds, not hours. The trace of an engine
    in this process has all that this process does.

    Args:
        directory: where the trace goes; made when it is missing. None: `EngineConfig.profiler_dir`.
        num_steps: end by itself after so many steps, from 1. None: `stop_profile` ends it.
        with_stack: record the Python frames around each operation; slower.
        record_shapes: record the shapes of the operations' inputs.
        profile_memory: record allocations.

    Raises `LifecycleError` while a profile is running in the engine's process, and `RequestError` for a directory that
    cannot be written to, or none.
    """
    if num_steps is not None and num_steps < 1:
        raise RequestError(f"start_profile: {refused('num_steps', num_steps, 'at least 1')}", field="num_steps")
    options = {"with_stack": with_stack, "record_shapes": record_shapes, "profile_memory": profile_memory}
    driver.executor.start_profile(directory, num_steps, **options)


@VERBS.add(combine=combine.end_to_end)
def stop_profile(driver: EngineDriver, *, timeout: float | None = None) -> list[str]:
    """End the profile that `start_profile` began, and return the paths of its traces: one per replica.

    They are on the disk of the machine where the model runs, for Perfetto (ui.perfetto.dev) or chrome://tracing. Raises
    `LifecycleError` where no profile was begun; of a fleet, where one of the replicas has none, since it was started
    again meanwhile: the others have written theirs, and log where.
    """
    return driver.executor.stop_profile()


@VERBS.add(when="any time", after_shutdown=True, public=False, combine=combine.metrics)
def get_core_metrics(driver: EngineDriver, *, timeout: float | None = None) -> CoreMetrics:
    """Counters and gauges of the core, of now."""
    return driver.core.metrics()


@VERBS.add(when="any time", public=False)
def require_running(driver: EngineDriver, verb: str, *, timeout: float | None = None) -> None:
    """Raise, naming `verb`, unless a request that is added now is computed without another call."""
    driver.core.lifecycle.require_running(verb[:80])
