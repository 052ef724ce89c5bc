"""Errors as HTTP responses, in the shape that the clients of a dialect read."""

from typing import Any

from rollout_engine.base.errors import (
    CallTimeoutError,
    ConfigError,
    DirtyWeightsError,
    EngineDeadError,
    LifecycleError,
    RequestError,
    RetryableError,
    RolloutEngineError,
    RPCError,
    RPCTimeoutError,
    StaleVersionError,
    TransferTimeoutError,
    WeightUpdateError,
)
from rollout_engine.serve.route import Dialect, Reply
from rollout_engine.sessions.errors import SessionEndedError, SessionNotFoundError

RETRY_SECONDS = 1
_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (SessionEndedError, 403),
    (SessionNotFoundError, 404),
    (RequestError, 400),
    (ConfigError, 400),
    (TransferTimeoutError, 504),
    (RPCTimeoutError, 504),
    (CallTimeoutError, 504),
    (StaleVersionError, 409),
    (DirtyWeightsError, 409),
    (WeightUpdateError, 400),
    (LifecycleError, 409),
    (RetryableError, 503),
    (EngineDeadError, 500),
    (RolloutEngineError, 500),
)
"""The first that fits. Clients retry 500, 502 and 503: only transient errors, or broken engines, get one."""
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    501: "NotSupportedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HttpProblem(Exception):
    """A request that the server itself refuses."""

    def __init__(self, status: int, message: str, *, field: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.field, self.headers = status, field, headers or {}


def problem_reply(problem: BaseException, dialect: Dialect) -> Reply:
    """The response of an error."""
    status, headers = status_of(problem), dict(getattr(problem, "headers", {}))
    if status == 503:
        headers.setdefault("retry-after", str(RETRY_SECONDS))
    return Reply(problem_body(problem, dialect), status, headers)


def problem_body(problem: BaseException, dialect: Dialect) -> dict[str, Any]:
    """The JSON of an error.

    vLLM's clients read `error.message`, SGLang's also `message` at the top, and its weight verbs `success`.
    """
    status = status_of(problem)
    message = str(problem) if isinstance(problem, RolloutEngineError | HttpProblem) else "Internal error."
    if dialect == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    said = {
        "message": message,
        "type": _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError"),
        "param": getattr(problem, "field", None) or None,
        "code": status,
    }
    if dialect == "sglang":
        return {"error": said, "object": "error", "success": False, **said}
    return {"error": said}


def status_of(problem: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(problem, HttpProblem):
        return problem.status
    if isinstance(problem, RPCError) and problem.rank is None and not isinstance(problem, RPCTimeoutError):
        return 400  # it did not begin
    return next((status for kind, status in _STATUS if isinstance(problem, kind)), 500)
