"""The part of a gateway that rollouts of agents use: `rollout_engine.rollouts.gateway` has it, tests have a fake."""

from collections.abc import Sequence
from typing import Any, Protocol

from rollout_engine.sessions.rows import SessionRow


class AgentSession(Protocol):
    """One session: the addresses and the key that an agent gets, and the rows of its answers."""

    id: str
    api_key: str
    openai_base_url: str
    """Base URL of OpenAI's chat and Responses APIs."""
    anthropic_base_url: str
    """Base URL of Anthropic's Messages API."""

    @property
    def ended_by(self) -> str | None:
        """Why it takes no more requests, for example "policy_version"; None: it takes some."""
        ...

    def rows(self) -> Sequence[SessionRow]:
        """The rows so far."""
        ...

    def reward(self, reward: float, row: int | None = None) -> None:
        """Set the reward of the session, or of one of its rows."""
        ...

    def close(self) -> None:
        """End its requests, and forget it. Calling it again is a no-op."""
        ...


class AgentGateway(Protocol):
    """Makes sessions. Any thread may call it."""

    def session(
        self, *, sampling_params: dict[str, Any], tokens: int | None = None, pin_version: bool = False
    ) -> AgentSession:
        """Make a session of at most `tokens` tokens; `sampling_params`: fields for all of its requests.

        `pin_version`: whether all of its answers are to be of one policy version.
        """
        ...

    def close(self) -> None:
        """Stop the server; no-op if it has been stopped."""
        ...
