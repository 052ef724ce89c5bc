"""Answers of our actors, which are bytes of msgpack; Ray's errors become ours."""

from typing import Any

import msgspec

from rollout_engine.base.errors import ConfigError, EngineDeadError, RetryableError

SAME_VERSION = "install the same version of rollout-engine on every node of the cluster."
"""Advice if the two ends do not understand one another."""
_SHOWN_CHARS = 200


def read_answer(ray: Any, reference: Any, seconds: float, kind: Any, name: str) -> Any:
    """Wait for the answer of the actor called `name`, and decode it as `kind`.

    Raises `TimeoutError`; `RetryableError` if the actor cannot be reached, and may or may not have run the call;
    `EngineDeadError` if it has ended; `ConfigError` if it cannot run on its node, or its answer cannot be read.
    """
    errors = ray.exceptions
    try:
        return msgspec.msgpack.decode(ray.get(reference, timeout=seconds), type=kind)
    except errors.GetTimeoutError:
        raise TimeoutError(f"{name} did not answer within {seconds:g} s.") from None
    except errors.ActorUnavailableError as problem:
        raise RetryableError(f"{name} cannot be reached just now: {cause(problem)}.") from problem
    except errors.RayError as problem:
        is_set_up = not isinstance(problem, errors.RayTaskError | errors.RuntimeEnvSetupError)
        if is_set_up and not getattr(problem, "actor_init_failed", False):
            raise EngineDeadError(f"{name}: its actor is gone: {cause(problem)}.") from problem
        raise ConfigError(f"{name} cannot run on its node: {cause(problem)}. {SAME_VERSION}") from problem
    except msgspec.MsgspecError as problem:
        raise ConfigError(f"{name} sent an answer that cannot be read ({problem}): {SAME_VERSION}") from None


def cause(problem: BaseException) -> str:
    """The last line of an error's text: Ray puts tracebacks before it."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines or [type(problem).__name__])[-1][:_SHOWN_CHARS].rstrip(".")
