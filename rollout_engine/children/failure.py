"""An error in a message between processes: encoded on one end, raised on the other."""

from traceback import format_exception
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

    @property
    def text(self) -> str:
        """Class and text of the error: "ValueError: no such row"."""
        return f"{self.kind}: {self.message}"

    def as_error(self, method: str = "") -> RolloutEngineError:
        """Make the error to raise on this end. `method` names the call that failed, if it was a call."""
        return self.as_known_error() or RPCError(f"{method}: {self.text}", method=method, traceback=self.traceback)

    def as_known_error(self) -> RolloutEngineError | None:
        """Make the error to raise on this end; None for one that `rollout_engine.base.errors` does not have."""
        options: dict[str, Any] = {}
        if self.kind in ("RPCError", "RPCTimeoutError"):
            options = dict(method=self.method, rank=self.rank, traceback=self.traceback)
        elif self.kind == "RequestError":
            options = dict(field=self.field, bound=self.bound)
        error: RolloutEngineError | None = _ERRORS[self.kind](self.message, **options) if self.kind in _ERRORS else None
        return error


_ERRORS: dict[str, Any] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
} | {"WireError": WireError}


def failure_of(error: BaseException) -> Failure:
    """Encode an error, to be raised on the other end; one that is not known there takes its traceback along."""
    kind = type(error).__name__
    if isinstance(error, RPCError):
        return Failure(kind, str(error), traceback=error.traceback, method=error.method, rank=error.rank)
    field, bound = (error.field, error.bound) if isinstance(error, RequestError) else ("", "")
    traceback = "" if _ERRORS.get(kind) is type(error) else "".join(format_exception(error))
    return Failure(kind, text_of(error), field, bound, traceback)
