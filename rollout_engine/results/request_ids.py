"""Request ids: names of a client's unfinished requests. The core never sees them."""

from collections.abc import Callable, Iterable
from typing import Any

from rollout_engine.base.errors import RequestError, check_text_size

MAX_REQUEST_ID_BYTES = 256
"""Longest request id, as UTF-8."""


class RequestIds:
    """Checks the ids that users choose, and makes the others."""

    def __init__(self, is_unfinished: Callable[[str], bool]) -> None:
        self._is_unfinished = is_unfinished
        self._num_made = 0

    def check_id(self, request_id: Any) -> str:
        """Return the id if a new request can have it. Raises `RequestError`."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError.for_field("request_id", request_id, "a non-empty string")
        check_text_size("request_id", request_id, MAX_REQUEST_ID_BYTES)
        if self._is_unfinished(request_id):
            raise RequestError.for_field("request_id", request_id, "unique among unfinished requests")
        return request_id

    def make(self) -> str:
        """Make an id that no unfinished request has."""
        while True:
            self._num_made += 1
            name = f"request-{self._num_made}"
            if not self._is_unfinished(name):
                return name


def as_request_ids(request_ids: str | Iterable[str]) -> list[str]:
    """Return one id or several as a list. Raises `RequestError` for values that cannot be an id."""
    ids = [request_ids] if isinstance(request_ids, str) or not isinstance(request_ids, Iterable) else list(request_ids)
    for request_id in ids:
        if not isinstance(request_id, str):
            raise RequestError.for_field("request_ids", request_id, "a request's id, or several: strings")
    return ids
