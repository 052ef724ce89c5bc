"""Plays one episode of an agent, on a thread of its own: a session, the run, its reward."""

import inspect
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout_engine.base.errors import RewardError, RolloutEngineError
from rollout_engine.children.program import Program, ProgramEnd
from rollout_engine.rollouts.agents.agent import Agent
from rollout_engine.rollouts.agents.episode import Outcome
from rollout_engine.rollouts.agents.gateway_seam import AgentSession
from rollout_engine.rollouts.agents.reward import as_reward, have_rewards, judge, printed_reward
from rollout_engine.rollouts.agents.workplace import Workplace, Workplaces
from rollout_engine.rollouts.episodes.env_host import one_line
from rollout_engine.sessions.rows import SessionRow

_NO_REWARD = (
    "ended without a reward: {}, give Agent(reward=...), or set one on the session before the end of the episode"
)
_OF_PROGRAMS = 'print {"reward": NUMBER} as the last line'
_OF_FUNCTIONS = "return a number"


class Playing:
    """One episode. `play` is called on a thread of its own; `stop` and `leave` on any."""

    def __init__(
        self, agent: Agent, open_session: Callable[[], AgentSession], task: Any, seed: int, places: Workplaces | None
    ) -> None:
        """`seed`: that of the program, ROLLOUT_SEED. `places`: for its directory; None: the agent is a function."""
        self._agent, self._open_session, self._task, self._seed = agent, open_session, task, seed
        self._places = places
        self._lock = threading.Lock()
        self._session: AgentSession | None = None
        self._program: Program | None = None
        self._is_stopped = False
        self._rows: Sequence[SessionRow] | None = None
        """Those of the session when it was closed."""
        self.ended_by: str | None = None
        """Why the session took no more requests when it was closed; None: it took some."""

    @property
    def session_id(self) -> str:
        """Id of its session; "" before there is one."""
        return "" if self._session is None else self._session.id

    def play(self) -> Any:
        """Run the agent to its end; returns its `Outcome`, or an awaitable of it for a function that is async."""
        session = self._open_session()
        with self._lock:
            self._session, is_stopped = session, self._is_stopped
        if is_stopped:
            session.close()
            return Outcome("episode_timeout")
        if self._agent.function is None:
            assert self._places is not None
            return self._run_program(session, Workplace(self._agent, self._places))
        found = self._agent.function(session, self._task)
        return self._await(session, found) if inspect.isawaitable(found) else self._judge_function(session, found)

    def stop(self) -> None:
        """Kill the program; of a function, end the session. `play` then returns soon, if the function does."""
        with self._lock:
            self._is_stopped, program = True, self._program
        if program is not None:
            program.kill()
        elif self._agent.function is not None:
            self.leave()

    def leave(self) -> Sequence[SessionRow]:
        """End the session; returns the rows that it had."""
        with self._lock:
            self._is_stopped, session = True, self._session
            if session is not None and self._rows is None:
                self._rows, self.ended_by = session.rows(), session.ended_by
                session.close()
        return self._rows or []

    def _run_program(self, session: AgentSession, place: Workplace) -> Outcome:
        try:
            start = time.monotonic()
            variables = place.variables(session, self._task, self._seed)
            size = self._agent.max_output_bytes
            program = Program(
                self._agent.command, environment=variables, directory=place.directory, max_output_bytes=size
            )
            with self._lock:
                self._program = program
                if self._is_stopped:
                    program.kill()
            end = program.wait(self._agent.timeout)
            return self._judge_program(session, end, place, time.monotonic() - start)
        finally:
            place.remove()

    def _judge_program(self, session: AgentSession, end: ProgramEnd, place: Workplace, seconds: float) -> Outcome:
        """The outcome of a program that has ended."""
        info = {
            "task": self._task,
            "status": end.status,
            "output": end.output,
            "errors": end.errors,
            "num_output_bytes": end.num_bytes,
            "seconds": seconds,
        }
        is_cut = self._is_stopped and not end.is_late and end.status in (None, -signal.SIGKILL)
        problem = "" if is_cut else self._fault(end)
        if problem:
            return Outcome("error", error=one_line(f"{self._agent.name}: {problem}"), info=info)
        printed: float | None = None
        try:
            printed = printed_reward(end.output)
        except RewardError as error:
            if self._agent.reward is None:
                return Outcome("error", error=one_line(f"{self._agent.name}: {error}"), info=info)
        facts = {"output": end.output, "directory": place.directory, "status": end.status}
        return self._reward(session, printed, info, facts, is_cut=is_cut, advice=_OF_PROGRAMS)

    def _fault(self, end: ProgramEnd) -> str:
        """Why a run of a program is none that counts; "": it is one."""
        said = end.errors.strip().rpartition("\n")[2] or end.output.strip().rpartition("\n")[2]
        last = f" (it wrote: {said[-200:]})" if said else ""
        if end.problem:
            return f"it did not start: {end.problem}."
        if end.is_late:
            return f"it did not end within {self._agent.timeout:g} seconds (Agent(timeout=...)), and was killed{last}."
        if end.status is None:
            return f"it was lost: its supervising process was killed{last}."
        if end.status < 0:
            name = f"signal {-end.status}"
            with suppress(ValueError):
                name = signal.Signals(-end.status).name
            return f"it was killed by {name}{last}."
        return f"it exited with status {end.status}{last}." if end.status else ""

    async def _await(self, session: AgentSession, found: Any) -> Outcome:
        return self._judge_function(session, await found)

    def _judge_function(self, session: AgentSession, returned: Any) -> Outcome:
        """The outcome of a function that has returned."""
        own = None if returned is None else as_reward(returned, f"{self._agent.name} returned")
        info = {"task": self._task}
        facts = {"output": "", "directory": None, "status": 0}
        return self._reward(session, own, info, facts, is_cut=self._is_stopped, advice=_OF_FUNCTIONS)

    def _reward(
        self,
        session: AgentSession,
        own: float | None,
        info: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        is_cut: bool,
        advice: str,
    ) -> Outcome:
        """The outcome of a run that counts; `own` is the reward that it gives itself."""
        rows, ended_by = session.rows(), "episode_timeout" if is_cut else "terminated"
        if self._agent.reward is not None:
            messages = list(rows[-1].messages) if rows else []
            arguments = {"task": self._task, "messages": messages, "rows": list(rows), **facts}
            try:
                own = judge(self._agent, arguments)
            except RolloutEngineError:
                raise
            except Exception as problem:
                raise RewardError(f"reward= raised {type(problem).__name__}: {problem}") from problem
        if own is None and not have_rewards(rows):
            if not is_cut:
                return Outcome("error", error=f"{self._agent.name} {_NO_REWARD.format(advice)}.", info=info)
            own = 0.0
        return Outcome(ended_by, own, info=info)  # type: ignore[arg-type]  # one of the two words above
