"""One call under way, and the episode that it belongs to."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from envs_adapters.base import Action
from rollout_engine.base.errors import StepDeadlineError
from rollout_engine.base.user_code import UserCode
from rollout_engine.rollouts.episodes.env_host import EnvFailure


class Host(Protocol):
    """The environment of one episode, in this process or another one."""

    @property
    def is_async(self) -> bool: ...
    @property
    def has_close(self) -> bool: ...
    def reset(self, seed: int) -> Any: ...
    def step(self, action: Action) -> Any: ...
    def close(self) -> Any: ...


class Place(Protocol):
    """The threads or event loop on which calls run."""

    def submit(self, call: "Call") -> None: ...
    def write_off(self, call: "Call", message: str) -> None: ...
    def cancel(self, call: "Call") -> None: ...


class Episode:
    """An episode of `EnvCalls`, whose calls run one after the other."""

    __slots__ = ("host", "is_closed", "key", "running", "stuck", "waiting")

    def __init__(self, key: int, host: Host | None = None) -> None:
        self.key, self.host = key, host
        self.waiting: deque[Call] = deque()
        self.running: Call | None = None
        """The call that has begun and not returned, its deadline passed or not."""
        self.stuck = ""
        """Name of the call that has not returned by its deadline; "" once it has."""
        self.is_closed = False


class Call:
    """A call of one method of an episode, or of a function of the rollout for it."""

    def __init__(
        self,
        episode: Episode,
        place: Place,
        what: str,
        work: Callable[[], Any],
        on_deadline: Callable[["Call"], object],
        *,
        is_own: bool = False,
        is_close: bool = False,
    ) -> None:
        self.episode, self.place, self.what, self.work = episode, place, what, work
        """`what` names it in messages, for example "GuessNumber: step"."""
        self.is_own, self.is_close = is_own, is_close
        """Whether it is a function of our own, not a method of the environment; whether it is the method `close`."""
        self.on_deadline = on_deadline
        self.code = UserCode(lambda: self.what)
        self.is_on_thread = self.is_written_off = False
        """Whether a thread that was made for calls is in it; whether that thread has been given up."""
        self.stop: Callable[[], object] | None = None
        """Cancels its task, if it runs on an event loop."""
        self.seconds, self.deadline = 0.0, 0.0
        """Seconds that it may take, and its deadline by the monotonic clock."""
        self.phase = ""
        """The phase that it is in before its work; "" in the work itself."""

    @property
    def is_async(self) -> bool:
        """Whether it belongs on an event loop from its beginning."""
        return self.episode.host is not None and self.episode.host.is_async and not self.is_own

    @property
    def is_dropped(self) -> bool:
        """Whether its result is no longer needed, so that it need not begin."""
        return self.episode.is_closed and not self.is_close


def overdue(call: Call) -> EnvFailure:
    """The failure of a call that did not return by its deadline."""
    limit = f"{call.seconds:g} seconds"
    what = (
        f"{call.what}: {call.phase} took more than {limit}."
        if call.phase
        else (f"{call.what} did not return within {limit} (step_timeout).")
    )
    return EnvFailure(what, StepDeadlineError(what))
