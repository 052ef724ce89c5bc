"""One call under way, and the episode that it belongs to."""

from collections import deque
from collections.abc import Callable
from typing import Any

from rollout_engine.episodes.env_host import EnvFailure, EnvHost
from rollout_engine.errors import StepDeadlineError
from rollout_engine.user_code import UserCode


class Episode:
    """An episode of `EnvCalls`, whose calls run one after the other."""

    __slots__ = ("host", "is_closed", "key", "running", "stuck", "waiting")

    def __init__(self, key: int, host: EnvHost | None = None) -> None:
        self.key, self.host = key, host
        self.waiting: deque[Call] = deque()
        self.running: Call | None = None
        """The call that has begun and not returned, its deadline passed or not."""
        self.stuck = ""
        """What has not returned by its deadline; "" once it has."""
        self.is_closed = False


class Call:
    """A call of one method of an episode, or of a function beside it."""

    __slots__ = ("code", "episode", "is_close", "is_on_thread", "is_written_off", "on_deadline", "stop", "what", "work")

    def __init__(
        self,
        episode: Episode,
        what: str,
        work: Callable[[], Any],
        on_deadline: Callable[["Call"], object],
        *,
        is_close: bool = False,
    ) -> None:
        self.episode, self.what, self.work, self.is_close = episode, what, work, is_close
        """`what` names it in messages, for example "GuessNumber: step"."""
        self.on_deadline = on_deadline
        self.code = UserCode(lambda: self.what)
        self.is_on_thread = self.is_written_off = False
        """Whether a thread that was made for calls is in it; whether that thread has been given up."""
        self.stop: Callable[[], object] | None = None
        """Cancels its task, where it runs on an event loop."""

    @property
    def is_dropped(self) -> bool:
        """Whether nobody wants it any more, so that it need not begin."""
        return self.episode.is_closed and not self.is_close


def overdue(what: str, seconds: float) -> EnvFailure:
    """The failure of a call that did not return by its deadline."""
    reason = f"{what} did not return within {seconds:g} seconds (step_timeout)."
    return EnvFailure(reason, StepDeadlineError(reason))
