"""Plays the episodes of a rollout over agents: starts runs, takes their outcomes, and ends those that are late."""

import heapq
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from envs_adapters.base import EnvSpec
from rollout_engine.base.errors import EpisodeError, RolloutEngineError, StepDeadlineError, error_text
from rollout_engine.rollouts.agents.episode import AgentEpisode, AgentGroup, Outcome
from rollout_engine.rollouts.agents.gateway_seam import AgentGateway
from rollout_engine.rollouts.agents.plan import AgentPlan
from rollout_engine.rollouts.agents.playing import Playing
from rollout_engine.rollouts.agents.reward import have_rewards
from rollout_engine.rollouts.agents.workplace import Workplaces
from rollout_engine.rollouts.episodes.env_calls import EnvCalls, EnvFailure
from rollout_engine.rollouts.episodes.env_host import one_line

logger = logging.getLogger("rollout_engine")

_LOOK_SECONDS = 0.05
"""Seconds that it waits for agents, so that an interrupt is handled soon."""
_JUDGE_SECONDS = 90.0
"""Seconds beyond its own that the run of a program may take: to be killed, judged, and cleaned up after."""


_MAX_SECONDS = 1e9
_SPARE_SESSIONS = 64
"""Sessions beyond those of the agents that run: of functions that have not returned after their time was up."""


class AgentRun:
    """Plays agents: call `advance` until not `unfinished`, and `close` in any case.

    The engine is driven by the gateway's server, on a thread of its own.
    """

    def __init__(
        self,
        plan: AgentPlan,
        open_gateway: Callable[..., AgentGateway],
        *,
        may_all_fail: bool = False,
        has_news: threading.Event | None = None,
    ) -> None:
        """`open_gateway` is `RolloutPolicy.gateway`, and called by the first `advance`.

        `may_all_fail`: only warn if every episode fails, as for those of a larger set that are played again.
        `has_news`: set once there is something to do, of several runs; then `advance` does not wait. None: its own.
        """
        self._plan, self._open_gateway, self._may_all_fail = plan, open_gateway, may_all_fail
        self._gateway: AgentGateway | None = None
        self._places: Workplaces | None = None
        """The directories of the programs that were started."""
        self._num_started = 0
        self._running: dict[int, Playing] = {}
        self._ended: dict[int, list[AgentEpisode]] = {}
        """Group -> its episodes that have ended, until all have."""
        self._deadlines: list[tuple[float, int]] = []
        self._failures: list[tuple[str, BaseException | None]] = []
        self._complete: list[AgentGroup] = []
        self._waits = has_news is None
        self._has_news = threading.Event() if has_news is None else has_news
        seconds = plan.agent.timeout + (0.0 if plan.agent.function else _JUDGE_SECONDS)
        threads = min(plan.max_in_flight, plan.num_episodes)
        spec = EnvSpec(dict, name=plan.agent.name, num_workers=threads, step_timeout=seconds)
        self._calls = EnvCalls(spec, self._has_news.set)

    @property
    def unfinished(self) -> bool:
        """Whether groups have not been returned yet."""
        return bool(self._running) or self._num_started < self._plan.num_episodes

    @property
    def num_groups(self) -> int:
        """Groups in all."""
        return self._plan.num_starts

    @property
    def has_news(self) -> bool:
        """Whether `advance` has something to do at once: an agent to start, or an outcome that has arrived."""
        starts = self._num_started < self._plan.num_episodes and len(self._running) < self._plan.max_in_flight
        return starts or self._has_news.is_set()

    @property
    def is_sampling(self) -> bool:
        """Whether `advance` computes a step if there are no news: never, the gateway's thread does."""
        return False

    @property
    def num_open_tokens(self) -> int:
        """Tokens of the episodes that have ended, of groups that are not complete."""
        return sum(episode.num_tokens for group in self._ended.values() for episode in group)

    def advance(self) -> list[AgentGroup]:
        """Do all that can be done now, or wait a moment. Returns the groups that are complete.

        Raises `EpisodeError` if every episode failed, with the first fault as its cause, unless `may_all_fail`.
        """
        self._start()
        if self._waits:
            self._has_news.wait(_LOOK_SECONDS)
            self._has_news.clear()
        for key, result in self._calls.take():
            if key in self._running:
                self._end(key, self._outcome(key, result))
        self._end_late()
        complete, self._complete = self._complete, []
        if not self.unfinished and self._failures:
            self._report_failures()
        return complete

    def stop_waiting(self) -> None:
        """Make an `advance` on another thread return soon: it never waits long."""

    def close(self) -> None:
        """Kill all programs, end all sessions, and stop the gateway."""
        for key, playing in self._running.items():
            playing.stop()
            self._calls.close(key)
        self._calls.end()
        for playing in self._running.values():
            playing.leave()
        self._running.clear()
        self._num_started = self._plan.num_episodes
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None
        if self._places is not None:
            self._places.remove()
            self._places = None

    def _start(self) -> None:
        """Start as many agents as may run."""
        plan = self._plan
        if self._gateway is None:
            turns = {} if plan.max_turns is None else {"session_turns": plan.max_turns}
            seconds = min(plan.most_seconds, _MAX_SECONDS) + _JUDGE_SECONDS
            self._gateway = self._open_gateway(
                session_seconds=seconds, max_sessions=plan.max_in_flight + _SPARE_SESSIONS, **turns
            )
            self._places = Workplaces() if plan.agent.function is None else None
        gateway = self._gateway
        while self._num_started < plan.num_episodes and len(self._running) < plan.max_in_flight:
            key = self._num_started
            group, member = plan.place(key)
            sampling = {**plan.sampling, "seed": plan.episode_seed(group, member)}
            options: Any = {"sampling_params": sampling, "tokens": plan.max_tokens, "pin_version": plan.pins_version}
            open_session = partial(gateway.session, **options)
            playing = Playing(plan.agent, open_session, plan.tasks[group], plan.env_seed(group), self._places)
            self._running[key] = playing
            self._num_started += 1
            self._calls.run(key, playing.play)
            heapq.heappush(self._deadlines, (time.monotonic() + plan.episode_timeout, key))

    def _outcome(self, key: int, result: Any) -> Outcome:
        """The outcome that a call's result stands for."""
        if not isinstance(result, EnvFailure):
            assert isinstance(result, Outcome)
            return result
        agent, problem = self._plan.agent, result.exception
        info = {"task": self._plan.tasks[self._plan.place(key)[0]]}
        if isinstance(problem, StepDeadlineError) and agent.function is not None:
            reason = f"{agent.name} did not return within {agent.timeout:g} seconds (Agent(timeout=...))."
        elif isinstance(problem, StepDeadlineError):
            reason = f"{agent.name} has ended, but reward= did not return within {_JUDGE_SECONDS:g} seconds."
        elif isinstance(problem, RolloutEngineError):
            reason = one_line(f"{agent.name}: {problem}")
        else:
            reason = result.reason if problem is None else one_line(f"{agent.name} raised {error_text(problem)}")
        return Outcome("error", error=reason, info=info, cause=problem)

    def _end(self, key: int, outcome: Outcome) -> None:
        plan, playing = self._plan, self._running.pop(key)
        self._calls.close(key)
        playing.stop()
        rows = playing.leave()
        if playing.ended_by == "policy_version" and outcome.ended_by in ("terminated", "error"):
            outcome = outcome.at_update(has_rewards=have_rewards(rows))
        if outcome.error is not None:
            self._failures.append((outcome.error, outcome.cause))
        group, member = plan.place(key)
        seed = plan.episode_seed(group, member)
        episode = AgentEpisode(key, group, member, seed, playing.session_id, rows, outcome)
        ended = self._ended.setdefault(group, [])
        ended.append(episode)
        if len(ended) == plan.num_samples:
            del self._ended[group]
            ended.sort(key=lambda each: each.member)
            self._complete.append(AgentGroup(group, ended, plan.params))

    def _end_late(self) -> None:
        """Kill the programs whose time is up: their runs are judged as they are. Functions are left."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, key = heapq.heappop(self._deadlines)
            if key in self._running:
                self._running[key].stop()
                if self._plan.agent.function is not None:
                    task = self._plan.tasks[self._plan.place(key)[0]]
                    self._end(key, Outcome("episode_timeout", 0.0, info={"task": task}))

    def _report_failures(self) -> None:
        (reason, cause), count = self._failures[0], self._plan.num_episodes
        if len(self._failures) == count and not self._may_all_fail:
            which = "The episode failed" if count == 1 else f"All {count} episodes failed; the first"
            raise EpisodeError(f"{which}: {reason}") from cause
        logger.warning("%d of %d episodes failed; the first: %s", len(self._failures), count, reason)
