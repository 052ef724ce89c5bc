"""The gateway: agents that speak HTTP to the policy, each in a session, whose conversations become training rows.

    with policy.gateway() as gateway:
        sessions = [gateway.session(group_id=0) for _ in range(8)]
        for session in sessions:
            run_my_agent(session.openai_base_url, session.api_key)
        batch = gateway.batch(sessions, rewards=[...])
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])

The keys of a batch are those of `rollouts.agents.rows`. "episode_id" is the number of the session among those of the
batch; "group_id" the session's own if it is an int, else a number for each name, and sessions without one are a group
each. ("next", "reward") is there if the sessions have rewards.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.sampling_params import SamplingLike, as_sampling_params
from rollout_engine.batches.rollout_batch import Layout
from rollout_engine.batches.summary import RolloutBatch
from rollout_engine.faces.verb_methods import Face
from rollout_engine.rollouts.agents.episode import AgentEpisode, Outcome
from rollout_engine.rollouts.agents.rows import agent_batch
from rollout_engine.rollouts.groups import GroupBatcher
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.serve.sessions.call import check_forced
from rollout_engine.serve.sessions.handlers import addresses
from rollout_engine.sessions.errors import SessionNotFoundError
from rollout_engine.sessions.forced_params import forced_params
from rollout_engine.sessions.rows import SessionRow
from rollout_engine.sessions.session import Session


class GatewaySession:
    """One agent's session: the addresses for its requests, and the rows that these make."""

    def __init__(self, gateway: "Gateway", session: Session, url: str) -> None:
        self._gateway, self._session = gateway, session
        found = addresses(session, url)
        self.id: str = found["id"]
        self.api_key: str = found["api_key"]
        """Key of this session alone. It reaches neither rows nor rewards."""
        self.openai_base_url: str = found["openai_base_url"]
        """For OpenAI's clients: chat and responses."""
        self.anthropic_base_url: str = found["anthropic_base_url"]
        self.group_id = session.group_id

    def rows(self) -> list[SessionRow]:
        """The training rows so far."""
        return self._session.rows()

    def reward(self, reward: float, row: int | None = None) -> None:
        """Set the reward of the session, or of one of its rows. Raises `RequestError`."""
        self._session.set_reward(reward, row)

    @property
    def is_closed(self) -> bool:
        """Whether its rows are gone: it was deleted, or its time was over long ago."""
        return self._session.is_deleted

    @property
    def ended_by(self) -> str | None:
        """Why it takes no more requests: "seconds", "tokens", "bytes", "turns" or "policy_version"; None: it does."""
        return self._session.ended_by(time.monotonic())

    @property
    def total_reward(self) -> float | None:
        """The session's reward; None: not set."""
        return self._session.reward

    def close(self) -> None:
        """Delete the session: its rows are gone, and its requests are cancelled. May be called again."""
        self._gateway.delete(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self.close()


class Gateway:
    """A server for agents, on a thread of its own; `RolloutPolicy.gateway` makes one."""

    def __init__(self, policy: Face, sampling: Mapping[str, Any], options: ServeOptions) -> None:
        self._policy, self._sampling = policy, dict(sampling)
        self._batcher = GroupBatcher(policy.frontend)
        self._server = HttpServer(policy, options).start()
        self._sessions = self._server.app.served.sessions
        self._is_closed = False
        self.options = options
        """Those of its server; `api_key` and `admin_key` were drawn unless given."""

    @property
    def url(self) -> str:
        """URL of the server, for example "http://127.0.0.1:8000"."""
        return self._server.url

    def session(
        self,
        group_id: int | str | None = None,
        *,
        sampling_params: SamplingLike | None = None,
        seconds: float | None = None,
        tokens: int | None = None,
        pin_version: bool = False,
    ) -> GatewaySession:
        """Make a session for one run of an agent.

        Args:
            group_id: equal for sessions that are samples of one task, whose rewards are compared.
            sampling_params: params of every request in place of the gateway's, over those that the agent asks for. With
                a seed, request k is drawn as turn k of an episode with that seed.
            seconds, tokens: bounds below those of the server.
            pin_version: whether all answers are to be of the policy version that is live when the first request
                arrives. A weight update ends the session: its requests are refused, and the one that runs ends with the
                tokens it has.

        Raises `RequestError` for bounds beyond the server's, `RetryableError` at `max_sessions` and
        `all_sessions_bytes`, and `LifecycleError` once the gateway is closed.
        """
        if self._is_closed:
            what = f"This gateway is closed: no server answers at {self.url}, so no agent could use a new session"
            raise LifecycleError(f"{what}. Make another one by policy.gateway(); the rows so far can still be read.")
        self._sessions.end_late()
        now, registry = time.monotonic(), self._sessions.registry
        sampling = self._sampling if sampling_params is None else forced_fields(sampling_params)
        options: Any = {"seconds": seconds, "tokens": tokens, "pin_version": pin_version}
        made = registry.create(now=now, group_id=group_id, sampling=sampling, **options)
        return GatewaySession(self, made, self.url)

    def batch(
        self,
        sessions: Sequence[GatewaySession],
        rewards: Sequence[float] | None = None,
        *,
        layout: Layout = "padded",
    ) -> RolloutBatch:
        """The rows of sessions as one TensorDict, session by session, with the keys of the table above.

        `rewards`: one for each session; None: those that were set, if all were. A session without answers has one
        row without tokens, so that its reward counts in its group. Raises `RequestError` if none has an answer, if one
        is given twice or was closed, and if some sessions have a reward and others have none.
        """
        _check_sessions(sessions)
        if rewards is not None:
            if len(rewards) != len(sessions):
                raise RequestError.for_field("rewards", list(rewards), f"one for each of {len(sessions)} sessions")
            for session, reward in zip(sessions, rewards, strict=True):
                session.reward(float(reward))
        episodes = _episodes(sessions)
        rows = [row for each in episodes for row in each.rows]
        if not rows:
            raise RequestError.for_field("sessions", f"{len(sessions)} sessions", "some with an answer of the policy")
        codec, pad_token_id = self._policy.frontend.inputs.codec, self._batcher.pad_token_id
        has_rewards = _have_rewards(episodes)
        batch = agent_batch(episodes, codec, pad_token_id=pad_token_id, layout=layout, has_rewards=has_rewards)
        params, adapters = ([each for row in rows for each in getattr(row, name)] for name in ("params", "adapters"))
        return self._batcher.describe(batch, params, adapters, layout)

    def delete(self, session_id: str) -> None:
        """Delete a session, if there still is one of this id."""
        try:
            self._sessions.delete(session_id)
        except SessionNotFoundError:
            pass

    def close(self) -> None:
        """Stop the server. Its sessions stay readable here. May be called again."""
        self._is_closed = True
        self._server.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self.close()


class GatewayMethods(Face):
    """Methods of a policy for agents that speak HTTP."""

    def gateway(
        self, sampling_params: SamplingLike | None = None, *, host: str = "127.0.0.1", port: int = 0, **options: Any
    ) -> Gateway:
        """Start a server for agents; their conversations become training rows, token by token (docs/gateway.md).

        Args:
            sampling_params: params of every request of every session, over those that agents ask for. A
                `SamplingParams` forces the distribution (`sessions.forced_params.DRAWS`), and fields that are not the
                defaults; a dictionary forces the params that it has.
            host, port: the address to listen on; 0: a port that is free.
            options: further fields of `ServeOptions`. Keys are drawn unless given: an agent has that of its session.

        Raises `ConfigError` as `HttpServer` does, and for options that do not fit.
        """
        self.frontend.require_running("gateway")
        forced = {} if sampling_params is None else forced_fields(sampling_params)
        keys = {name: secrets.token_urlsafe(32) for name in ("api_key", "admin_key")}
        return Gateway(self, forced, ServeOptions(host=host, port=port, **{**keys, **options, "sessions": True}))


def forced_fields(given: SamplingLike) -> dict[str, Any]:
    """The sampling params that a session forces on its requests. Raises `RequestError`."""
    if isinstance(given, dict):
        return check_forced(given)
    return check_forced(forced_params(as_sampling_params(given)))


def _episodes(sessions: Sequence[GatewaySession]) -> list[AgentEpisode]:
    """Make an episode of each session: its rows, under its group's number."""
    groups = _group_ids([session.group_id for session in sessions])
    return [
        AgentEpisode(
            key=key,
            group=group,
            member=groups[:key].count(group),
            seed=rows[0].samples[0][1].seed if rows else 0,
            session_id=session.id,
            rows=rows,
            outcome=Outcome(reward=None if rows else session.total_reward),
        )
        for key, (session, group) in enumerate(zip(sessions, groups, strict=True))
        for rows in [session.rows()]
    ]


def _have_rewards(episodes: Sequence[AgentEpisode]) -> bool:
    """Whether all rows have a reward. Raises `RequestError` if some have one, and others have none."""
    given = [row.reward for each in episodes for row in each.rows]
    given += [each.outcome.reward for each in episodes if not each.rows]
    if None in given and any(each is not None for each in given):
        bound = "set for every session, or for none"
        raise RequestError.for_field("rewards", given, bound, "Give rewards=, or call session.reward of each.")
    return None not in given


def _group_ids(given: Sequence[int | str | None]) -> list[int]:
    """A number for each session: equal ones for equal names, the ints themselves."""
    free = max((each for each in given if isinstance(each, int)), default=-1) + 1
    numbers: dict[Any, int] = {}
    found = []
    for index, each in enumerate(given):
        key = ("alone", index) if each is None else each
        if isinstance(key, int):
            found.append(key)
            continue
        if key not in numbers:
            numbers[key] = free + len(numbers)
        found.append(numbers[key])
    return found


def _check_sessions(sessions: Sequence[GatewaySession]) -> None:
    """Raise `RequestError` for a session that is given twice, or has been closed."""
    if len({session.id for session in sessions}) < len(sessions):
        raise RequestError.for_field("sessions", [session.id for session in sessions], "each given once")
    if closed := [session.id for session in sessions if session.is_closed]:
        raise RequestError.for_field("sessions", closed, "open: `close` deletes the rows, so batch them before")
