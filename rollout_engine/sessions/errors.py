"""Errors of sessions. Both are answered with a status that clients do not retry."""

from rollout_engine.base.errors import RequestError, RolloutEngineError


class SessionNotFoundError(RolloutEngineError):
    """There is no session of this id, or another key was given: an answer does not show which."""

    def __init__(self) -> None:
        super().__init__(
            "There is no session of this id and key. Make one (POST /sessions), and give its api_key as "
            "'Authorization: Bearer KEY' or 'X-Api-Key: KEY'."
        )


class SessionEndedError(RequestError):
    """The session takes no more requests: its time or one of its budgets is used up. Its rows stay readable."""
