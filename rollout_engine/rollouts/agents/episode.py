"""Episodes of agents that have ended, and their groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.rollouts.episodes.episode import EndedBy
from rollout_engine.rollouts.episodes.group import GroupOfEpisodes
from rollout_engine.sessions.rows import SessionRow


class Outcome(msgspec.Struct, frozen=True):
    """How one run of an agent has ended."""

    ended_by: EndedBy = "terminated"
    reward: float | None = None
    """None: rows have rewards of their own, or there is none."""
    error: str | None = None
    """Why it failed; None: it did not."""
    info: Mapping[str, Any] = {}
    cause: BaseException | None = None
    """The exception of this process that made it fail."""

    def at_update(self, *, has_rewards: bool) -> "Outcome":
        """The same of a run whose session a weight update ended, and which may have failed for it: it is truncated.

        `has_rewards`: whether the session has rewards; else one that has none itself gets 0.
        """
        reward = 0.0 if self.reward is None and not has_rewards else self.reward
        return Outcome("policy_version", reward, info=self.info)


class AgentEpisode(msgspec.Struct, frozen=True):
    """One run of an agent: the rows of its session, and how it ended."""

    key: int
    """Number of the episode in the rollout."""
    group: int
    member: int
    """Which of the samples of its start."""
    seed: int
    """Base of the seeds of its session's requests."""
    session_id: str
    """"" if it ended before it had a session."""
    rows: Sequence[SessionRow]
    outcome: Outcome

    @property
    def samples(self) -> list[CompletionOutput]:
        """All answers of the policy, each once."""
        return [sample for row in self.rows for _, sample in row.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_turns(self) -> int:
        """Answers that are in the rows."""
        return 1 + max((number for row in self.rows for number in row.turns), default=-1)

    @property
    def reward(self) -> float:
        """The reward of the episode: its own, or that of its last row with one, else 0."""
        if self.outcome.reward is not None:
            return self.outcome.reward
        return next((row.reward for row in reversed(self.rows) if row.reward is not None), 0.0)

    @property
    def counted_reward(self) -> float | None:
        """The same; None if it failed."""
        return self.reward if self.outcome.error is None else None


class AgentGroup(GroupOfEpisodes[AgentEpisode], frozen=True):
    """The runs of an agent on one task."""
