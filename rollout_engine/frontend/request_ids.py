"""Request ids of users: labels of a client's unfinished requests, known to nothing below the front end."""

from collections.abc import Callable, Iterable
from typing import Any

from rollout_engine.errors import RequestError


class RequestIds:
    """Checks the ids that a user chooses, and makes up those that the user leaves to the engine."""

    def __init__(self, is_unfinished: Callable[[str], bool]) -> None:
        self._is_unfinished = is_unfinished
        self._num_made = 0

    def check(self, request_id: Any) -> str:
        """The id, if a new request can have it. Raises `RequestError`."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError.for_field("request_id", request_id, "a non-empty string")
        if self._is_unfinished(request_id):
            raise RequestError.for_field("request_id", request_id, "unique among unfinished requests")
        return request_id

    def make(self) -> str:
        """An id that no unfinished request has."""
        while True:
            self._num_made += 1
            name = f"request-{self._num_made}"
            if not self._is_unfinished(name):
                return name


def as_request_ids(request_ids: str | Iterable[str]) -> list[str]:
    """One id or several as a list. Raises `RequestError` for what cannot be an id."""
    ids = [request_ids] if isinstance(request_ids, str) or not isinstance(request_ids, Iterable) else list(request_ids)
    for request_id in ids:
        if not isinstance(request_id, str):
            raise RequestError.for_field("request_ids", request_id, "a request's id, or several: strings")
    return ids
