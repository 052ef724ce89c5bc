"""Groups of agents for a collector, which starts and ends them one by one: each is a rollout of one start.

All of them share a gateway. A group that is too old is killed, and played again with the same seeds.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollout_engine.base.errors import EpisodeError, LifecycleError, RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.seeds import mix
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.agents.agent import Agent
from rollout_engine.rollouts.agents.episode import AgentGroup
from rollout_engine.rollouts.agents.gateway_seam import AgentGateway, AgentSession
from rollout_engine.rollouts.agents.plan import AgentPlan, as_task
from rollout_engine.rollouts.agents.run import AgentRun
from rollout_engine.rollouts.plan import GroupTask, RolloutArguments

_LOOK_SECONDS = 0.05
"""Seconds that it waits for agents, so that an interrupt is handled soon."""
_MAX_SESSIONS = 1 << 16


class AgentGroups:
    """Runs groups of agents: `start` each, call `advance` for those that are complete, and `close` in any case."""

    def __init__(
        self, plan: AgentPlan, open_gateway: Callable[..., AgentGateway], *, most_failed: int | None = None
    ) -> None:
        """`plan`: of each group, without its task. `open_gateway` is `RolloutPolicy.gateway`.

        `most_failed`: groups in a row of which every episode failed, from which on `advance` raises; None: never.
        """
        self._plan, self._most_failed = plan, most_failed
        self._gateway = _SharedGateway(open_gateway)
        self._running: dict[int, AgentRun] = {}
        self._failed: list[str] = []
        """The first fault of each group that failed wholly, since one did not."""
        self._has_news = threading.Event()
        self.aborted: list[GroupTask] = []
        """Groups that an abort of the engine cut short: none, since agents continue behind such an answer."""

    def start(self, task: GroupTask, begun: Sequence[CompletionOutput] = ()) -> GroupTask:
        """Begin with one more group. Returns its task with its seed."""
        assert not begun, "agents have no journal"
        of_task: dict[str, Any] = {"tasks": {task.index: task.prompt}, "starts": (task.index,)}
        plan = msgspec.structs.replace(self._plan, **of_task, max_in_flight=self._plan.num_samples)
        run = AgentRun(plan, self._gateway.open, may_all_fail=True, has_news=self._has_news)
        self._running[task.index] = run
        return task.with_seed(mix(plan.seed, task.index))

    def advance(self) -> list[AgentGroup]:
        """Do all that can be done now, or wait a moment. Returns the groups that became complete.

        Raises `EpisodeError` if every episode of the last groups has failed.
        """
        self._has_news.clear()
        complete = []
        for index, run in [*self._running.items()]:
            complete += run.advance()
            if not run.unfinished:
                self._running.pop(index).close()
        for group in complete:
            self._note_failures(group)
        if not complete and self._running:
            self._has_news.wait(_LOOK_SECONDS)
        return complete

    def abort(self, indexes: Collection[int]) -> None:
        """Kill the unfinished groups of these tasks, without a result."""
        for index in [each for each in indexes if each in self._running]:
            self._running.pop(index).close()

    def reward(self, task: GroupTask, output: RequestOutput) -> list[Any]:
        """No group of agents is made again from its samples."""
        raise AssertionError("agents have no journal")

    def take_progress(self, min_tokens: int) -> Iterator[tuple[GroupTask, list[CompletionOutput]]]:
        """Tokens of unfinished groups: none, they are not journalled."""
        return iter(())

    def close(self) -> None:
        """Kill all programs, end all sessions, and stop the gateway. Calling it again is a no-op."""
        self.abort([*self._running])
        self._gateway.stop()

    def _note_failures(self, group: AgentGroup) -> None:
        errors = [episode.outcome.error for episode in group.episodes]
        if None in errors:
            self._failed.clear()
            return
        self._failed.append(str(errors[0]))
        if self._most_failed is not None and len(self._failed) >= self._most_failed:
            what = f"All episodes of the last {len(self._failed)} groups failed"
            raise EpisodeError(f"{what}; the first: {self._failed[0]}")


def agent_tasks(dataset: Iterable[Any], plan: AgentPlan) -> Iterator[GroupTask]:
    """Make the group of each task of a dataset, which is read one task at a time.

    Raises `RequestError` while it is read, for a task that JSON cannot hold.
    """
    for index, given in enumerate(dataset):
        task = as_task(given, f"dataset[{index}]")
        yield GroupTask(index, task, task, plan.params)


def collecting_plan(frontend: Frontend, arguments: RolloutArguments, agent: Agent) -> AgentPlan:
    """Check the arguments of `RolloutPolicy.collect(tasks, params, env=Agent(...))`. Raises `RequestError`."""
    if (number := arguments.options.get("num_episodes")) is not None:
        raise RequestError.for_field("num_episodes", number, "absent: collect reads its tasks from the dataset")
    dataset = arguments.prompts
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        raise RequestError.for_field("dataset", dataset, "the agent's tasks, one for each group: an iterable of rows")
    without_tasks = msgspec.structs.replace(arguments, prompts=None)
    return AgentPlan.of(frontend, without_tasks, agent)


class _SharedGateway:
    """One gateway behind all groups, which is opened with the first of them and outlives each."""

    def __init__(self, open_gateway: Callable[..., AgentGateway]) -> None:
        self._open_gateway = open_gateway
        self._inner: AgentGateway | None = None

    def open(self, **options: Any) -> "_SharedGateway":
        """Open it, unless it is open. Every group has the same options."""
        if self._inner is None:
            self._inner = self._open_gateway(**options | {"max_sessions": _MAX_SESSIONS})
        return self

    def session(self, **options: Any) -> AgentSession:
        """Make a session, as `AgentGateway` does."""
        inner = self._inner
        if inner is None:
            raise LifecycleError("The collector of this agent is closed.")
        return inner.session(**options)

    def close(self) -> None:
        """A group has ended."""

    def stop(self) -> None:
        """Stop the server."""
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()
