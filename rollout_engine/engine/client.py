"""The seam under every face: an `EngineClient` reaches one core, in this process or another, or many.

LocalClient     a driver in this process                       rollout_engine.engine.local_client
ProcessClient   a driver in a process of its own, over zmq     rollout_engine.process.process_client
FleetClient     many of those                                  rollout_engine.fleet.run.client
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, RequestError, RolloutEngineError, check_text_size
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.engine.calls import CallFuture
from rollout_engine.execution.model_info import ModelInfo
from sync.base import WeightSource

_MAX_SESSION_ID_BYTES = 1_024


class Route(NamedTuple):
    """The replica of a fleet that gets a request. A client of one engine has no choice, and ignores it."""

    session_id: str | None = None
    """Requests of one id go to the same replica as long as it serves, then to another one."""
    replica_index: int | None = None
    """Index of the replica that computes the request first."""

    @classmethod
    def from_options(cls, session_id: object, replica_index: int | None = None) -> "Route":
        """Raise `RequestError` for a session id that is no text, or has no effect since a replica's index is given."""
        if session_id is None:
            return cls(None, replica_index)
        if not isinstance(session_id, str) or not session_id:
            raise RequestError.for_field("session_id", session_id, "a str that is not empty, or None")
        check_text_size("session_id", session_id, _MAX_SESSION_ID_BYTES)
        if replica_index is not None:
            what = f"session_id={session_id!r:.80} and the index {replica_index} of a replica both choose the replica"
            raise RequestError(f"{what}: give one of them.", field="session_id", value=session_id)
        return cls(session_id)


ANYWHERE = Route()


class EngineInfo(ModelInfo, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a loaded model and the engine's configuration, as a front end needs them."""

    config: EngineConfig


class Listener(Protocol):
    """Receives the outputs and errors of a client's requests, on any thread."""

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Take the outputs of a step."""

    def refuse(self, first_sequence_id: int, error: RolloutEngineError) -> None:
        """Take the error of a request that the core refused."""

    def fail_all(self, error: EngineDeadError) -> None:
        """Take the error of every open request: the core is gone."""


class EngineClient(Protocol):
    """One user of an engine. Any thread may call anything.

    Every method raises `LifecycleError` in a forked child of the client's process.
    """

    @property
    def index(self) -> int:
        """Index of this client at its core, from 0. Its sequences have ids from `index << 40`."""
        ...

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes and configuration."""
        ...

    @property
    def needs_turns(self) -> bool:
        """Whether steps are computed only by the threads that call `turn`."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the live weights, as last reported."""
        ...

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone; None while it lives."""
        ...

    def listen(self, listener: Listener) -> None:
        """Set the listener. Call it before the first request is added."""

    def add_request(self, request: EngineCoreRequest, route: Route = ANYWHERE) -> None:
        """Queue a request. If the core refuses it, the error is raised here, or the listener gets it later."""

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences; their outputs report it. Unknown ids are a no-op."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb of `rollout_engine.engine.verbs`; the future has its result or error.

        Cancelling it cancels the call: nothing of it is left in the engine, unless its verb is running just now.

        Raises `RequestError` for arguments that cannot cross to another process. For arguments of other types than the
        verb's it is raised here, or is the future's error.
        """
        ...

    def update_weights(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """Run one whole weight update. Blocks."""
        ...

    def turn(self, has_news: Callable[[], bool]) -> bool:
        """Compute a step on this thread, unless `has_news()` by the time it is this thread's turn.

        Returns False if others compute the steps, and this thread can only wait for news.
        """
        ...

    def require_usable(self) -> None:
        """Raise `LifecycleError` or `EngineDeadError` if nothing can be computed any more."""

    def shutdown(self) -> None:
        """Leave the core, or end it if it is this client's. Calling it again is a no-op."""
