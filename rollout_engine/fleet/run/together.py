"""Calls of a verb on several replicas, as one call."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout_engine.base.errors import DrainTimeoutError, EngineDeadError, LifecycleError, RequestError, RetryableError
from rollout_engine.engine.calls import CallFuture, copy_outcome
from rollout_engine.engine.client import EngineClient
from rollout_engine.engine.verb import Verb


def call_all(
    verb: Verb, arguments: Mapping[str, Any], clients: Sequence[EngineClient], is_over: Callable[[], bool]
) -> CallFuture:
    """Call a verb on every replica; the future has `verb.combine` of their results, in their order.

    It ends when all have answered. The first error of a replica is its error. One that is lost meanwhile is left out
    if others have answered; `RetryableError` if the verb needs them all (`Verb.needs_all`), or waits for requests:
    those of the lost one continue elsewhere. `is_over`: whether the fleet itself is gone.
    """
    assert verb.combine is not None, "a verb of all replicas says how their results combine"
    gathered = _Gathered(verb, arguments, len(clients), is_over)
    if not clients:
        gathered.future.fail(_make_lost_error(verb, is_over))
    for index, client in enumerate(clients):
        try:
            answer = client.call(verb.name, arguments)
        except EngineDeadError as error:
            answer = CallFuture()
            answer.fail(error)
        gathered.add(index, answer)  # other errors are those of the arguments: the first replica raises, none has begun
    return gathered.future


def call_one(
    verb: Verb, arguments: Mapping[str, Any], clients: Sequence[EngineClient], is_over: Callable[[], bool]
) -> CallFuture:
    """Call a verb on the first of these replicas; on the next one if it is lost before it has answered.

    `RetryableError` if all are lost and the fleet is not over.
    """
    result = _future()
    _ask_next(verb, arguments, list(clients), is_over, result)
    return result


def is_refused(call: Future[Any]) -> bool:
    """Whether a call has changed nothing. A pause whose time is over continues."""
    error = None if call.cancelled() else call.exception()
    return isinstance(error, LifecycleError | RequestError) and not isinstance(error, DrainTimeoutError)


def _ask_next(
    verb: Verb,
    arguments: Mapping[str, Any],
    clients: list[EngineClient],
    is_over: Callable[[], bool],
    result: CallFuture,
) -> None:
    if not clients:
        result.fail(_make_lost_error(verb, is_over))
        return
    first, *others = clients
    try:
        answer = first.call(verb.name, arguments)
    except EngineDeadError:
        return _ask_next(verb, arguments, others, is_over, result)

    def take_answer(answer: Future[Any]) -> None:
        if not answer.cancelled() and isinstance(answer.exception(), EngineDeadError):
            _ask_next(verb, arguments, others, is_over, result)
        elif not answer.cancelled():
            copy_outcome(answer, result)

    answer.add_done_callback(take_answer)
    result.add_done_callback(lambda result: answer.cancel() if result.cancelled() else None)


def _make_lost_error(verb: Verb, is_over: Callable[[], bool]) -> EngineDeadError | RetryableError:
    if is_over():
        return EngineDeadError(f"{verb.name}: no replica of the fleet lives.")
    return RetryableError(f"{verb.name}: a replica was lost before it had answered; the fleet goes on: call it again.")


def _future() -> CallFuture:
    """The future of a call on several replicas; it counts as begun, since that is unknown here."""
    future = CallFuture()
    future.begin()
    return future


class _Gathered:
    """The answers of replicas to one call, as they arrive."""

    def __init__(self, verb: Verb, arguments: Mapping[str, Any], count: int, is_over: Callable[[], bool]) -> None:
        self._verb, self._arguments, self._left, self._is_over = verb, dict(arguments), count, is_over
        self._lock = threading.Lock()
        self._answers: list[Future[Any] | None] = [None] * count
        self.future = _future()
        self.future.add_done_callback(self._take_back)

    def add(self, index: int, answer: CallFuture) -> None:
        """Wait for the answer of one replica."""
        self._answers[index] = answer
        answer.add_done_callback(partial(self._take_answer, index))

    def _take_answer(self, index: int, answer: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        answers = [answer for answer in self._answers if answer is not None and not answer.cancelled()]
        errors = [error for answer in answers if (error := answer.exception())]
        results = [answer.result() for answer in answers if not answer.exception()]
        needs_all = self._verb.needs_all or self._verb.until is not None
        if results and not needs_all:
            errors = [error for error in errors if not isinstance(error, EngineDeadError)]
        if errors and isinstance(errors[0], EngineDeadError) and not self._is_over():
            self.future.fail(_make_lost_error(self._verb, self._is_over))
        elif errors:
            self.future.fail(self._in_all(errors[0], len(errors) + len(results), errors))
        else:
            assert self._verb.combine is not None
            self.future.succeed(self._verb.combine(results))

    def _in_all(self, error: BaseException, count: int, errors: Sequence[BaseException]) -> BaseException:
        """The error of all: a call is reported as never beginning only if it begins nowhere."""
        if self._verb.late is None or self._verb.seconds(self._arguments) is None:
            return error
        never = str(self._verb.too_late(self._arguments, begun=False))
        num_never = [str(each) for each in errors].count(never)
        return self._verb.too_late(self._arguments, begun=True) if 0 < num_never < count else error

    def _take_back(self, future: Future[Any]) -> None:
        if future.cancelled():
            for answer in self._answers:
                if answer is not None:
                    answer.cancel()
