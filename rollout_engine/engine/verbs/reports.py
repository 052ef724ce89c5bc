"""Verbs that report on an engine: load, health, integrity, metrics, and profiles of its work."""

import os
import time
from typing import Any

from rollout_engine.base.errors import (
    RequestError,
    refused,
)
from rollout_engine.base.metrics import CoreMetrics
from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.health import Health
from rollout_engine.engine.verb import Arguments
from rollout_engine.engine.verb_table import VERBS


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
    """Ask the engine for a sign of life, which it gives during a step too. Raises `EngineDeadError` when it is gone."""
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
    """Recount requests, blocks and references from scratch; an AssertionError names any mismatch."""
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
    """Begin to profile the process that runs the model, by torch's profiler; `stop_profile` ends it.

    Steps are slower meanwhile, and the records stay in memory: profile seconds, not hours. The trace of an engine
    in this process has all that this process does.

    Args:
        directory: for the trace; made if it is missing. None: `EngineConfig.profiler_dir`.
        num_steps: end automatically after this number of steps, from 1. None: `stop_profile` ends it.
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

    They are on the disk of the machine that runs the model, for Perfetto (ui.perfetto.dev) or chrome://tracing. Raises
    `LifecycleError` if no profile was begun; of a fleet, if one of the replicas has none, since it was started
    again meanwhile: the others have written theirs, and log the paths.
    """
    return driver.executor.stop_profile()


@VERBS.add(when="any time", after_shutdown=True, public=False, combine=combine.metrics)
def get_core_metrics(driver: EngineDriver, *, timeout: float | None = None) -> CoreMetrics:
    """Present counters and gauges of the core."""
    return driver.core.metrics()


@VERBS.add(when="any time", public=False)
def require_running(driver: EngineDriver, verb: str, *, timeout: float | None = None) -> None:
    """Raise, naming `verb`, unless a request that is added now is computed without another call."""
    driver.core.lifecycle.require_running(verb[:80])
