"""The side of a session that a call of a dialect sees: it gives the call's prompt, and records its answers."""

from collections.abc import Sequence
from typing import Any, Protocol

from rollout_engine.base.outputs import RequestOutput
from rollout_engine.serve.chat.known_responses import KnownResponses
from rollout_engine.serve.chat.request import ChatRequest


class SessionHook(Protocol):
    """A session of `Asked.session`. Everything here is called on the event loop."""

    known_responses: KnownResponses
    """Responses of this session that a later request may name (`previous_response_id`)."""

    async def begin(self, request: ChatRequest) -> tuple[Any, dict[str, Any]]:
        """(place of the request among the session's turns, its prompt in our own form: {"prompt_token_ids": ...}).

        May change the request's `settings`. Raises `RequestError` or `HttpProblem`, nothing begun.
        """

    def record(self, place: Any, result: RequestOutput, answers: Sequence[dict[str, Any]]) -> None:
        """Record the samples of a place, whole, before the client has the last of them.

        `answers`: for each sample the message that a client sends back if it changes nothing.
        """

    def cancel(self, place: Any) -> None:
        """Forget a place that `begin` gave and that has no result: the call failed, or its client has left."""
