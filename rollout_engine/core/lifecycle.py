"""The lifecycle of an engine: one state machine over pausing, sleeping, weight updates and shutdown.

                 pause(mode)                      sleep(level)      (level 0 releases no memory)
    RUNNING <───────────────────> PAUSED ... ──────────────────> ASLEEP ── wake_up(tags) ──> as before
                 resume()                                                               └──> DIRTY after level 2
    any but ASLEEP ── begin_update() ──> UPDATING ── end_update() ──> as before, or DIRTY
    any ── shut_down() ──> DEAD

A pause lasts through sleep and updates until `resume`. While requests drain (mode "wait") steps continue; the pause or
sleep is complete once `finish_draining` was called. Several states may hold together: `state` is the strongest one.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, get_args

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of requests in flight: end now with the tokens they have, finish first, or freeze and continue later."""
MemoryTag = Literal["weights", "kv_cache", "scheduling"]
"""Parts that sleep and wake up: memory, and at level 0 the scheduling of requests alone."""
MODES: tuple[PauseMode, ...] = get_args(PauseMode)
TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""Memory that sleeps and wakes up."""
SCHEDULING: MemoryTag = "scheduling"


class State(StrEnum):
    """States of an engine, the strongest first."""

    DEAD = "DEAD"
    UPDATING = "UPDATING"
    ASLEEP = "ASLEEP"
    DIRTY = "DIRTY"
    PAUSED = "PAUSED"
    RUNNING = "RUNNING"


class Lifecycle:
    """The state of an engine, and the calls that it allows. `EngineCore` carries the transitions out.

    A verb that the state does not allow raises `LifecycleError` naming both, and changes nothing.
    """

    def __init__(self) -> None:
        self.paused: PauseMode | None = None
        """Mode of the pause in force."""
        self.asleep: set[MemoryTag] = set()
        """Memory that is released now; at level 0 "scheduling", and no memory."""
        self.level = 0
        """Level of the sleep in force: 0 keeps all memory, 1 the weights in host memory, 2 forgets them."""
        self.draining = False
        """Requests in flight are finishing before the pause or sleep is complete."""
        self.sleep_wanted: int | None = None
        """Level of the sleep to begin once nothing drains; None: none."""
        self.updating = False
        self.closed_for_update = False
        """New requests wait for the end of the update."""
        self.dirty = False
        """The weights are incomplete; only a complete update clears this."""
        self.forgotten = False
        """They are incomplete because a sleep at level 2 forgot them."""
        self.dead = False

    @property
    def state(self) -> State:
        """The strongest state. Weights that are asleep are ASLEEP before they are DIRTY; asleep KV ranks after both."""
        if self.dead:
            return State.DEAD
        if self.updating:
            return State.UPDATING
        if "weights" in self.asleep:
            return State.ASLEEP
        if self.dirty:
            return State.DIRTY
        if self.asleep:
            return State.ASLEEP
        return State.RUNNING if self.paused is None else State.PAUSED

    @property
    def can_step(self) -> bool:
        """Whether requests in flight may compute."""
        resident = not (self.asleep or self.dirty or self.dead)
        return resident and (self.paused is None or self.draining)

    @property
    def admits(self) -> bool:
        """Whether new requests join those in flight; otherwise they wait, or are refused."""
        closed = self.closed_for_update or self.sleep_wanted is not None or self.asleep
        return self.paused is None and not (closed or self.dirty or self.dead)

    def describe(self) -> str:
        """Describe the state for messages."""
        details = {
            State.ASLEEP: f"(level {self.level}: {', '.join(sorted(self.asleep))})",
            State.PAUSED: f"({self.paused})",
        }
        what = self.state + details.get(self.state, "")
        return f"{what}, draining" if self.draining else what

    def pause(self, mode: PauseMode, *, in_flight: bool) -> None:
        """Stop admitting; stop stepping too, unless mode "wait" leaves requests to finish."""
        self._check_mode("pause_generation", mode)
        self.require_alive("pause_generation")
        self._check_can_drain("pause_generation", mode, in_flight)
        if self.sleep_wanted is not None and mode == "keep":
            raise self._make_refusal("pause_generation", "requests in flight are to finish first, for a sleep")
        self.paused = mode
        self.draining = in_flight and mode == "wait"

    def resume(self) -> None:
        """Lift the pause; no-op without one."""
        self._check_between("resume_generation")
        if self.asleep:
            raise self._make_refusal("resume_generation", "call wake_up() first")
        self.paused, self.draining = None, False

    def sleep(self, level: int, mode: PauseMode, *, in_flight: bool) -> None:
        """Ask for sleep, which begins with `finish_draining`. Asleep already, it may only become deeper."""
        if level not in (0, 1, 2):
            raise LifecycleError(f"sleep: level={level!r} is not allowed: must be 0, 1 or 2.")
        self._check_mode("sleep", mode)
        self._check_between("sleep", but_draining=True)
        self._check_can_drain("sleep", mode, in_flight)
        if self.draining and mode == "keep":
            raise self._make_refusal("sleep", "requests in flight are to finish first; use mode='wait' or mode='abort'")
        self.sleep_wanted = level
        self.draining = in_flight and mode == "wait"

    def finish_draining(self) -> int:
        """Finish draining; enter the pending sleep and return its level; 0: no memory is to be released."""
        level, self.sleep_wanted, self.draining = self.sleep_wanted, None, False
        if level is None:
            return 0
        if level:
            self.level = max(self.level, level) if "weights" in self.asleep else level
            self.asleep = set(TAGS)
        elif not self.asleep:
            self.asleep = {SCHEDULING}
        return level

    def wake_up(self, tags: Iterable[str] | None) -> set[MemoryTag]:
        """Wake the parts named by `tags` (None: all); return those that slept. After level 2 weights wake DIRTY."""
        asked = check_tags(tags)
        self._check_between("wake_up")
        woken = self.asleep & asked
        self.asleep -= woken
        if "weights" in woken and self.level == 2:
            self.dirty = self.forgotten = True
        if not self.asleep:
            self.level = 0
        return woken

    def undo_wake_up(self, woken: set[MemoryTag], level: int) -> None:
        """Undo a `wake_up` from `level` that returned `woken`, for which there was no memory."""
        self.asleep |= woken
        self.level = level

    def begin_update(self, verb: str = "update_weights") -> None:
        """Begin an update, one at a time, onto resident weights. Steps continue. `verb`: the caller's method."""
        self._check_between(verb)
        if "weights" in self.asleep:
            raise self._make_refusal(verb, "the weights are not resident; call wake_up(['weights']) first")
        self.updating = True

    def end_update(self, *, dirty: bool | None) -> None:
        """Return to the state before. `dirty`: False after a complete update, None after one that changed nothing."""
        self.updating = self.closed_for_update = False
        if dirty is not None:
            self.dirty = dirty
            self.forgotten &= dirty

    def close_for_update(self, mode: PauseMode, *, in_flight: bool) -> None:
        """Admit nothing before the update has ended. Requests in flight may step on."""
        self._check_mode("update_weights", mode)
        if mode == "wait" and in_flight and not self.can_step:
            raise self._make_refusal(
                "update_weights", "requests in flight cannot finish now; use mode='abort' or 'keep'"
            )
        self.closed_for_update = True

    def stop_for_update(self) -> None:
        """Mark the live weights as incomplete until the update ends: they are being overwritten."""
        self.dirty = True

    def shut_down(self) -> None:
        """Enter DEAD, for good."""
        self.dead, self.draining, self.sleep_wanted = True, False, None

    def require_alive(self, verb: str) -> None:
        """Raise `LifecycleError` when DEAD."""
        if self.dead:
            raise self._make_refusal(verb, "it was shut down; make a new engine")

    def require_weights(self, verb: str) -> None:
        """Raise unless the weights can be computed with: `LifecycleError`, or `DirtyWeightsError`."""
        self.require_alive(verb)
        if "weights" in self.asleep:
            raise self._make_refusal(verb, "the weights are not resident; call wake_up() first")
        self.require_clean(verb)
        if self.dirty:
            raise self._make_refusal(verb, "the weights are being written; wait until the update has ended")

    def require_clean(self, verb: str) -> None:
        """Raise `DirtyWeightsError` if the weights are resident but incomplete, and no update is completing them."""
        if self.dirty and not self.updating and "weights" not in self.asleep:
            raise DirtyWeightsError.for_verb(verb, forgotten=self.forgotten)

    def require_running(self, verb: str) -> None:
        """Raise if a request that is added now would wait for another call from outside, such as `resume`."""
        self.require_alive(verb)
        self.require_clean(verb)
        sleeps = self.sleep_wanted is not None or bool(self.asleep)
        if self.paused is not None or sleeps:
            call = "wake_up" if sleeps else "resume_generation"
            raise self._make_refusal(verb, f"it would wait indefinitely; call {call}() first")

    def _check_between(self, verb: str, *, but_draining: bool = False) -> None:
        """Raise during an update and (unless `but_draining`) while requests finish for a sleep."""
        self.require_alive(verb)
        if self.updating:
            raise self._make_refusal(verb, "wait until the update has ended")
        if self.sleep_wanted is not None and not but_draining:
            raise self._make_refusal(verb, "requests in flight are finishing for a sleep; abort them to end it sooner")

    def _check_can_drain(self, verb: str, mode: PauseMode, in_flight: bool) -> None:
        if mode == "wait" and in_flight and (self.asleep or self.dirty):
            raise self._make_refusal(verb, "requests in flight cannot finish now; use mode='abort' or mode='keep'")

    def _check_mode(self, verb: str, mode: str) -> None:
        if mode not in MODES:
            raise LifecycleError(f"{verb}: mode={mode!r} is not allowed: must be 'abort', 'wait' or 'keep'.")

    def _make_refusal(self, verb: str, advice: str) -> LifecycleError:
        return LifecycleError(f"{verb}: not possible while the engine is {self.describe()}: {advice}.")


def check_tags(tags: Iterable[str] | None) -> set[MemoryTag]:
    """The named tags as a set, all of them for None. Raises `LifecycleError` for an unknown name."""
    known = (*TAGS, SCHEDULING)
    if tags is None:
        return set(known)
    named = [tags] if isinstance(tags, str) else list(tags)
    if unknown := [tag for tag in named if tag not in known]:
        bound = "must be of 'weights', 'kv_cache' and 'scheduling'"
        raise LifecycleError(f"wake_up: tags={unknown!r} is not allowed: {bound}.")
    return {tag for tag in known if tag in named}
