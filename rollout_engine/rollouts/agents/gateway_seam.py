"""What a rollout of agents needs of a gateway: `rollout_engine.rollouts.gateway` has it, tests have a fake."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollout_engine.base.outputs import CompletionOutput


class AgentRow(Protocol):
    """A training row of a session, as `rollout_engine.sessions.rows` makes them."""

    reward: float | None
    """Set for this row alone, or for its whole session; None: neither."""
    messages: list[dict[str, Any]]
    samples: list[tuple[int, CompletionOutput]]


class AgentSession(Protocol):
    """One session: the addresses and the key that an agent gets, and the rows that came of it."""

    id: str
    api_key: str
    openai_base_url: str
    """Of OpenAI's chat and Responses APIs."""
    anthropic_base_url: str
    """Of Anthropic's Messages API."""

    def rows(self) -> Sequence[AgentRow]:
        """The rows so far."""
        ...

    def reward(self, reward: float, row: int | None = None) -> None:
        """Set the reward of the session, or of one of its rows."""
        ...

    def close(self) -> None:
        """End its requests, and accept no more. Calling it again is a no-op."""
        ...


class AgentGateway(Protocol):
    """Makes sessions. Any thread may call it."""

    def session(self, *, sampling: Mapping[str, Any]) -> AgentSession:
        """Begin a session; `sampling`: fields of `SamplingParams` for all of its requests."""
        ...

    def close(self) -> None:
        """Stop the server; no-op if it has been stopped."""
        ...
