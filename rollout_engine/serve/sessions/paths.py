"""Paths of sessions: rows of the route table with {id}, and the model's APIs below /sessions/{id}."""

from typing import NamedTuple

from rollout_engine.serve.tinker.paths import read_tinker_path

PREFIX = "/sessions"
_OWN = frozenset(("", "/rows", "/reward"))
_APIS = frozenset(
    ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/models"),
)
"""Routes that an agent reaches below its session, if the table has them."""


class Reached(NamedTuple):
    """The route that a path leads to."""

    path: str
    """Its path in the route table."""
    session_id: str = ""
    """The session in the path, or what else stands for {id}; "" for none."""
    by_agent: bool = False
    """Whether the session's own key opens it, and that alone."""


def read_path(path: str) -> Reached:
    """Find the route of a path. An unknown one below a session is returned as it is: the table has no such route."""
    if not path.startswith(PREFIX + "/"):
        return Reached(*read_tinker_path(path))
    session_id, slash, rest = path[len(PREFIX) + 1 :].partition("/")
    rest = (slash + rest).rstrip("/")
    if session_id and rest in _OWN:
        return Reached(f"{PREFIX}/{{id}}{rest}", session_id)
    return Reached(rest, session_id, by_agent=True) if session_id and rest in _APIS else Reached(path)
