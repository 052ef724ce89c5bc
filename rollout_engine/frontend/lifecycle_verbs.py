"""The lifecycle verbs that every synchronous engine and policy has."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.frontend.lifecycle_control import LifecycleControl


class LifecycleVerbs(ABC):
    """Pause, sleep and what belongs to them. All raise `LifecycleError`, naming state and verb, when out of order.

    Verbs may be called from any thread and wait for the step in progress. Pausing, resuming, sleeping and waking are
    idempotent. While the engine does not run, `step()` returns only what has ended, and calls that block until their
    requests are complete (`LLM.generate`, `RolloutPolicy.rollout`) refuse to start; those in progress wait.
    """

    @property
    @abstractmethod
    def lifecycle_control(self) -> LifecycleControl:
        """What carries them out."""

    def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        clear_cache: bool = False,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """Stop computing at a step boundary; returns when that is so. Its seconds are in `stats.last_pause_seconds`.

        Args:
            mode: "abort" ends requests in flight with the tokens they have; "wait" finishes them first (this call steps
                the engine, as others may); "keep" freezes them with their KV, and they go on at `resume_generation`.
            clear_cache: forget every known prefix too; frozen requests compute their KV again.
            wait_for_inflight_requests: True is the older spelling of mode="wait".

        New requests wait for `resume_generation`, or are turned away, by `EngineConfig.admission`.
        """
        self.lifecycle_control.pause("wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Go on after a pause."""
        self.lifecycle_control.resume()

    def is_paused(self) -> bool:
        """Whether a pause is in force (also while asleep)."""
        return self.lifecycle_control.is_paused()

    def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Step until nothing is in flight. Results wait for the next `step()`.

        Raises `DrainTimeoutError` (a `TimeoutError`) after `drain_timeout` seconds, `LifecycleError` when requests are
        frozen and so cannot finish. Requests that wait for resume or wake-up do not count.
        """
        self.lifecycle_control.wait_for_drain(drain_timeout)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back to the system.

        Args:
            level: 1 releases the KV pool and what is derived from the weights; 2 forgets the weights too, and after
                `wake_up` a complete `update_weights` has to come first.
            mode: of requests in flight, as for `pause_generation`. Those kept compute their KV again after `wake_up`.
        """
        self.lifecycle_control.sleep(level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory back: "weights", "kv_cache", or None for all. A pause from before the sleep still holds."""
        self.lifecycle_control.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether some memory is still released."""
        return self.lifecycle_control.is_sleeping()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every known prefix, and return whether that was done.

        It is refused (False, nothing changed) while requests in flight hold KV blocks, unless `reset_running_requests`:
        then they compute their KV again, to the same tokens.
        """
        return self.lifecycle_control.reset_prefix_cache(reset_running_requests=reset_running_requests)
