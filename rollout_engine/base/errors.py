"""All errors of the library. A message names the expected and the given value, the place, and what to do.

RolloutEngineError
├── ConfigError (ValueError)       an engine option
├── RequestError (ValueError)      one request: field, value, bound
├── LifecycleError                 a verb in the wrong state
│   └── DrainTimeoutError (TimeoutError)
├── CallTimeoutError (TimeoutError)  a call was not complete in the time given, and computes no more
│   └── GenerateTimeoutError       requests did not end by their deadline, and were aborted
├── RetryableError                 not now; the same request may be sent again
├── WeightUpdateError (SyncError)
│   ├── ManifestMismatchError  StaleVersionError  ChecksumError  TransferTimeoutError  DirtyWeightsError
├── EngineGenerateError            one request failed, the engine lives
├── StepMemoryError (MemoryError)  a step needed more memory than the device had; its requests failed
├── StepDeadlineError              the user's code did not return within step_deadline, and was interrupted
├── EngineDeadError                the engine's process is gone
├── RPCError                       a call by name was refused, or failed where the model runs; the engine lives
│   └── RPCTimeoutError (TimeoutError)
├── RewardError                    a reward function failed, the engine lives
├── TeacherError                   a teacher did not score a rollout, the engine lives
└── EpisodeError                   every episode of a rollout failed, for example at a fault of its environment
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from sync import errors as sync_errors

_CLOSE = 0.75
"""Similarity (difflib, 0 to 1) from which one name is taken for a misspelling of another."""
_SHOWN_CHARS = 80
"""Characters of a refused value that its error shows."""


class RolloutEngineError(Exception):
    """Root of all errors raised by this library."""


class ConfigError(RolloutEngineError, ValueError):
    """An engine option is unknown, of the wrong type, or out of bounds; or the model cannot be served."""


class RequestError(RolloutEngineError, ValueError):
    """A request was refused before it was queued. `field`, `value` and `bound` give the reason."""

    def __init__(self, message: str, *, field: str = "", value: object = None, bound: str = "") -> None:
        super().__init__(message)
        self.field, self.value, self.bound = field, value, bound

    @classmethod
    def for_field(cls, field: str, value: object, bound: str, hint: str = "") -> "RequestError":
        """A refused field, worded by `refused`."""
        return cls(refused(field, value, bound, hint), field=field, value=value, bound=bound)


class LifecycleError(RolloutEngineError):
    """A verb was called in a state that does not allow it."""


class DrainTimeoutError(LifecycleError, TimeoutError):
    """Requests in flight did not finish in the time given; they continue."""


class CallTimeoutError(RolloutEngineError, TimeoutError):
    """A call was not complete in the time given; nothing more of it is computed."""


class GenerateTimeoutError(CallTimeoutError):
    """Requests of a `generate` had not ended by their deadline, and were aborted."""

    def __init__(
        self, message: str, *, outputs: Sequence[object] = (), num_tokens: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.outputs = list(outputs)
        """Per prompt its `RequestOutput`; None if it was aborted."""
        self.num_tokens = dict(num_tokens or {})
        """Index of each prompt that was aborted -> the tokens that its samples had."""


class RetryableError(RolloutEngineError):
    """The request or call was not taken, or was aborted, through no fault of its own: try it again later."""


class WeightUpdateError(RolloutEngineError, sync_errors.SyncError):
    """A weight update was refused or failed; the old weights serve on, untouched."""


class ManifestMismatchError(WeightUpdateError, sync_errors.ManifestMismatch):
    """Names, shapes, dtypes or tied aliases differ from the engine's own."""


class StaleVersionError(WeightUpdateError, sync_errors.StaleVersion):
    """The version does not move forward; `reset_version=True` is for a trainer that restarted."""


class ChecksumError(WeightUpdateError, sync_errors.ChecksumMismatch):
    """Bytes arrived that are not the bytes sent, or a value is not finite."""


class TransferTimeoutError(WeightUpdateError, sync_errors.TransferTimeout):
    """A peer of the weight transport did not connect, or stopped answering, before the deadline."""


class DirtyWeightsError(WeightUpdateError):
    """The live weights are incomplete; only a complete update clears this."""

    @classmethod
    def for_verb(cls, verb: str, *, forgotten: bool) -> "DirtyWeightsError":
        """The error of a `verb` that needs complete weights. `forgotten`: a sleep at level 2 made them incomplete."""
        cause = "sleep(level=2) forgot them" if forgotten else "an update ended half-way, or a function wrote to them"
        advice = "Send a complete update first, by update_weights(...)"
        return cls(f"{verb}: the live weights are incomplete: {cause}. {advice}.")


class EngineGenerateError(RolloutEngineError):
    """One request failed; the engine and every other request continue."""


class StepMemoryError(RolloutEngineError, MemoryError):
    """The device had no memory left: for a step, whose requests fail while the engine lives, or to wake up."""


class StepDeadlineError(RolloutEngineError):
    """Code of yours, run by the engine, did not return within `EngineConfig.step_deadline`, and was interrupted."""


class EngineDeadError(RolloutEngineError):
    """The engine's process has ended, or cannot be reached: no request of this client continues. Make a new engine."""

    ADVICE = " Make a new engine."

    @property
    def cause(self) -> str:
        """The message without the advice and the last full stop, for a fleet, which makes the new engine itself."""
        return str(self).removesuffix(self.ADVICE).rstrip(".")


class RPCError(RolloutEngineError):
    """A call by name was refused, or raised an error; the engine continues.

    `method` failed on worker `rank`, with `traceback` there. `rank` is None if it was refused or failed elsewhere.
    """

    def __init__(self, message: str, *, method: str = "", rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.method, self.rank, self.traceback = method, rank, traceback


class RPCTimeoutError(RPCError, TimeoutError):
    """A call had not ended at its deadline. If it had begun it continues to its end, otherwise it never runs."""


class RewardError(RolloutEngineError):
    """A reward function raised, or did not return one finite number per completion; its rollout was aborted."""


class TeacherError(RolloutEngineError):
    """A teacher did not answer, or not with scores; the rollout's own engine continues."""


class EpisodeError(RolloutEngineError):
    """Every episode of a rollout failed; the first fault is its cause. If only some fail, the others are rows."""


_FROM_SYNC: dict[type[sync_errors.SyncError], type[WeightUpdateError]] = {
    sync_errors.ManifestMismatch: ManifestMismatchError,
    sync_errors.StaleVersion: StaleVersionError,
    sync_errors.ChecksumMismatch: ChecksumError,
    sync_errors.TransferTimeout: TransferTimeoutError,
}


@contextmanager
def as_weight_errors() -> Iterator[None]:
    """Re-raise a transport's own `SyncError` as the public error of the same meaning."""
    try:
        yield
    except WeightUpdateError:
        raise
    except sync_errors.SyncError as error:
        raise _FROM_SYNC.get(type(error), WeightUpdateError)(str(error)) from error


def refused(field: str, value: object, bound: str, hint: str = "") -> str:
    """Word the refusal of a field: ``top_p=0 is not allowed: must be in (0, 1].``"""
    shown = text_of(value, repr)
    if len(shown) > _SHOWN_CHARS:
        shown = shown[: _SHOWN_CHARS - 3] + "..."
    return f"{field}={shown} is not allowed: must be {bound}." + (f" {hint}" if hint else "")


def text_of(value: object, read: Callable[[object], str] = str) -> str:
    """`str` or `repr` of any value of a user's; if that raises, the value's type and the reason."""
    try:
        return read(value)
    except (Exception, SystemExit) as problem:  # nested too deep, an int of too many digits, a class that raises
        try:
            reason = str(problem)
        except (Exception, SystemExit):
            reason = type(problem).__name__
        return f"<{type(value).__name__}: {reason}>"


def error_text(problem: BaseException) -> str:
    """Class and text of an exception of the user's code: "ValueError: no such row"."""
    return f"{type(problem).__name__}: {text_of(problem)}"


def check_text_size(field: str, text: str, max_bytes: int) -> None:
    """Raise `RequestError` unless `text` is Unicode of at most `max_bytes` bytes as UTF-8."""
    bound = f"Unicode text of at most {max_bytes} bytes as UTF-8"
    if len(text) > max_bytes:
        raise RequestError.for_field(field, text[:_SHOWN_CHARS], bound, f"It has {len(text)} characters.")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        raise RequestError.for_field(field, text, bound) from None
    if num_bytes > max_bytes:
        raise RequestError.for_field(field, text, bound, f"It has {num_bytes} bytes.")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Word the refusal of an unknown name, with the known name that was probably meant, or else all."""
    names = sorted(known)
    hint = did_you_mean(name, names) or f"Known: {', '.join(names)}."
    return f"Unknown {kind} '{name}'. {hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``Did you mean 'temperature'?`` if one of `known` is close to `name`, else "".

    Close too is the only one that begins or ends with it, as `lora_path` does for `path`.
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    longer = [each for each in names if len(name) > 2 and (each.startswith(name) or each.endswith(f"_{name}"))]
    if not close and len(longer) == 1:
        close = longer
    return f"Did you mean '{close[0]}'?" if close else ""
