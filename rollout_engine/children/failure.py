"""An error in a message between processes: encoded on one end, raised on the other."""

from typing import Any

import msgspec

from rollout_engine.base import errors
from rollout_engine.base.errors import RequestError, RolloutEngineError, RPCError, text_of


class WireError(RolloutEngineError):
    """Frames that are no message. They were dropped; the connection stays."""


class Failure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """An error in a message: one of `rollout_engine.base.errors` by name, or any other with its traceback."""

    kind: str
    message: str
    field: str = ""
    bound: str = ""
    traceback: str = ""
    method: str = ""
    rank: int | None = None

    def as_error(self, method: str = "") -> RolloutEngineError:
        """Make the error to raise on this end. `method` names the call that failed, if it was a call."""
        own: RolloutEngineError | None = None
        if self.kind in ("RPCError", "RPCTimeoutError"):
            own = _ERRORS[self.kind](self.message, method=self.method, rank=self.rank, traceback=self.traceback)
        elif self.kind == "RequestError":
            own = RequestError(self.message, field=self.field, bound=self.bound)
        elif self.kind in _ERRORS:
            own = _ERRORS[self.kind](self.message)
        return own or RPCError(f"{method}: {self.kind}: {self.message}", method=method, traceback=self.traceback)


_ERRORS: dict[str, Any] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
} | {"WireError": WireError}


def failure_of(error: BaseException, traceback: str = "") -> Failure:
    """Encode an error, to be raised on the other end."""
    kind = type(error).__name__
    if isinstance(error, RPCError):
        return Failure(kind, str(error), traceback=error.traceback, method=error.method, rank=error.rank)
    known = _ERRORS.get(kind) is type(error)
    field, bound = getattr(error, "field", ""), getattr(error, "bound", "")
    is_request = isinstance(error, RequestError)
    return Failure(
        kind, text_of(error), field if is_request else "", bound if is_request else "", "" if known else traceback
    )
