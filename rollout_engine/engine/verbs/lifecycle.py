"""Verbs that stop an engine and let it continue: pauses, draining, sleep, and its prefix cache."""

from collections.abc import Callable, Iterable

from rollout_engine.base.errors import (
    DrainTimeoutError,
    RolloutEngineError,
)
from rollout_engine.base.metrics import CoreStats
from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.verb import Arguments
from rollout_engine.engine.verb_table import VERBS


def _late_drain(verb: str, effect: str = "") -> Callable[[Arguments, bool], RolloutEngineError]:
    """Make the error of a call that waits for requests in flight for too long. `effect`: that of the call on them."""

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
    """Stop computing at a step boundary; returns once it has stopped. Its seconds are in `stats.last_pause_seconds`.

    Args:
        mode: "abort" ends requests in flight with the tokens they have; "wait" finishes them first (in process this
            call steps the engine, as others may); "keep" freezes them with their KV, and they continue at
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
    """Continue after a pause."""
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
    """Release memory to the system, or at level 0 stop scheduling alone; until `wake_up`.

    Args:
        level: 0 releases nothing: it is a pause that `wake_up` ends, and weights may be updated meanwhile; 1 releases
            the KV pool and all that is derived from the weights; 2 drops the weights too, and after `wake_up` a
            complete `update_weights` is needed first.
        mode: of requests in flight, as for `pause_generation`. Those kept compute their KV again after `wake_up`, but
            for level 0, after which they continue on it.
        drain_timeout: as for `pause_generation`; the engine falls asleep once the requests have ended.
    """
    driver.deliver(driver.core.sleep(level, mode))


def _prepare_wake_up(tags: Iterable[str] | None, timeout: float | None) -> Arguments:
    return {"tags": tags if tags is None or isinstance(tags, str) else list(tags), "timeout": timeout}


@VERBS.add(prepare=_prepare_wake_up, combine=combine.nothing)
def wake_up(driver: EngineDriver, tags: str | list[str] | None = None, *, timeout: float | None = None) -> None:
    """Allocate memory again: "weights", "kv_cache", or None for all. "scheduling", or None, ends a sleep at level 0.

    A pause from before the sleep still holds.
    """
    driver.core.wake_up(tags)


@VERBS.add(when="any time", combine=any)
def is_sleeping(driver: EngineDriver, *, timeout: float | None = None) -> bool:
    """Whether some memory is still released, or a sleep at level 0 holds."""
    return bool(driver.core.lifecycle.asleep)


@VERBS.add(combine=all)
def reset_prefix_cache(
    driver: EngineDriver,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """Forget every known prefix, and return whether that was done.

    It is refused (False, nothing changed) while requests in flight hold KV blocks, unless `reset_running_requests`:
    then they compute their KV again, to the same tokens. `reset_connector`: blocks that the KV connector holds for
    models of this kind are forgotten as well, also for other engines that share it.
    """
    return driver.core.reset_prefix_cache(
        reset_running_requests=reset_running_requests, reset_connector=reset_connector
    )


@VERBS.add(public=False, combine=combine.nothing)
def meet_kv_peers(driver: EngineDriver, peers: list[dict[str, str]], *, timeout: float | None = None) -> None:
    """Give the KV connector the metadata of those of the fleet's other engines; an engine without one ignores it."""
    if driver.executor.kv_link is not None:
        driver.executor.kv_link.meet(peers)
