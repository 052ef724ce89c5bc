"""Results that clients poll for: requests are queued and answered by an id, and `retrieve_future` waits for a result.

A client has a bounded number of requests whose results it has not retrieved; more are answered 429, after which
Tinker's SDK waits and sends again. A retrieved result is kept a while longer, in case its response was lost.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from rollout_engine.base.errors import ConfigError, LifecycleError, RequestError, RolloutEngineError
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.request_log import logger
from rollout_engine.serve.route import Reply

POLL_SECONDS = 20.0
"""How long a poll waits for a result; the SDK waits 45 seconds for the response."""
_MOST_KEPT, _MOST_KEPT_BYTES = 256, 64 << 20
"""Results that are kept once they were retrieved, of all clients together."""


class Pending:
    """One queued request of a client."""

    __slots__ = ("abandon", "client_id", "finish", "outcome", "reply", "request_id")

    def __init__(self, client_id: str, request_id: str) -> None:
        self.client_id, self.request_id = client_id, request_id
        self.outcome: Future[tuple[Any, BaseException | None]] = Future()
        """A value or an error, once the work is done, on any thread."""
        self.outcome.set_running_or_notify_cancel()  # so that a poll that ends cancels nothing
        self.finish: Callable[[Any], Reply] = Reply
        """Makes the reply of a value; called once."""
        self.abandon: Callable[[], object] = int
        """Stops the work of a request that is not wanted any more."""
        self.reply: Reply | None = None
        """The reply, once it was retrieved."""

    async def wait(self) -> bool:
        """Wait for the outcome for up to `POLL_SECONDS`; whether there is one."""
        done, _ = await asyncio.wait([asyncio.wrap_future(self.outcome)], timeout=POLL_SECONDS)
        return bool(done)

    def retrieve(self) -> Reply:
        """The reply of a request that is done; an error in the form that Tinker's SDK raises."""
        if self.reply is None:
            try:
                value, problem = self.outcome.result()
                if problem is not None:
                    raise problem
                self.reply = self.finish(value)
            except Exception as problem:
                self.reply = _write_failure(problem)
        return self.reply


class Futures:
    """The queued requests of all clients, and results of late; on the server's event loop."""

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting`: results of one client that were not retrieved."""
        self._most_waiting = most_waiting
        self._pending: dict[str, Pending] = {}
        self._num_waiting: dict[str, int] = {}
        """By client."""
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Bytes of retrieved results, oldest first."""

    def find(self, request_id: str) -> Pending | None:
        """A request that is queued, or whose result is kept; a client that sends one again gets the same."""
        return self._pending.get(request_id)

    def get(self, request_id: str) -> Pending:
        """The same. Raises `HttpProblem` 410 for an unknown one; the SDK then sends a sample's request again."""
        found = self._pending.get(request_id)
        if found is None:
            what = f"There is no request '{request_id:.200}': its result was retrieved, or its session has ended"
            raise HttpProblem(410, f"{what}. Send the request again.", field="request_id")
        return found

    def add(self, client_id: str, request_id: str) -> Pending:
        """Queue a request. Raises `HttpProblem` 429 if the client has too many that it has not retrieved."""
        count = self._num_waiting.get(client_id, 0)
        if count >= self._most_waiting:
            what = f"{count} results of this client wait to be retrieved (tinker_waiting={self._most_waiting})"
            raise HttpProblem(429, f"{what}: retrieve some first.", headers={"retry-after": "1"})
        self._num_waiting[client_id] = count + 1
        found = self._pending[request_id] = Pending(client_id, request_id)
        return found

    def retrieve(self, pending: Pending) -> Reply:
        """The reply of a request that is done, which is kept a while."""
        is_first = pending.reply is None
        reply = pending.retrieve()
        if is_first and pending.request_id in self._pending:
            self._leave(pending)
            self._kept[pending.request_id] = len(reply.body) if isinstance(reply.body, bytes) else 1_000
            while len(self._kept) > _MOST_KEPT or sum(self._kept.values()) > _MOST_KEPT_BYTES:
                del self._pending[self._kept.popitem(last=False)[0]]
        return reply

    def drop(self, pending: Pending) -> None:
        """Stop and forget a request."""
        if self._pending.pop(pending.request_id, None) is None:
            return
        if self._kept.pop(pending.request_id, None) is None:
            self._leave(pending)
            pending.abandon()

    def drop_client(self, client_id: str) -> None:
        """Stop and forget all requests of a client."""
        for pending in [each for each in self._pending.values() if each.client_id == client_id]:
            self.drop(pending)
        self._num_waiting.pop(client_id, None)

    def _leave(self, pending: Pending) -> None:
        self._num_waiting[pending.client_id] = self._num_waiting.get(pending.client_id, 1) - 1


def _write_failure(problem: BaseException) -> Reply:
    """An error as a result: Tinker's SDK raises `RequestFailedError` with its text and category."""
    is_user = isinstance(problem, RequestError | ConfigError | LifecycleError)
    if isinstance(problem, HttpProblem):
        is_user = problem.status < 500
    is_known = isinstance(problem, RolloutEngineError | HttpProblem)
    if not is_known:
        logger.error("a request of Tinker's failed", exc_info=problem)
    text = str(problem) if is_known else "Internal error."
    return Reply({"error": text, "category": "user" if is_user else "server"})


class Ticket(msgspec.Struct, omit_defaults=True):
    """The answer to a request that is queued: an UntypedAPIFuture of Tinker's."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    """An id for each sample, in order."""
