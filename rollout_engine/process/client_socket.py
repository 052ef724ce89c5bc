"""A client's end of the socket to a core, on a thread of its own; any other thread may send and call.

That thread hands outputs and refusals to one listener, and once, when the core is gone, an `EngineDeadError` to
another. The core is gone when its lifeline closes, its connection drops, it sends its farewell, its process gives no
sign of life for `hang_seconds`, its interpreter none for `step_deadline`, or it sends frames that are no message.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

from rollout_engine.base.errors import EngineDeadError, LifecycleError, RetryableError
from rollout_engine.base.hidden_states import num_state_bytes
from rollout_engine.base.picture_cache import SentPictures
from rollout_engine.base.threads import start
from rollout_engine.children.failure import WireError
from rollout_engine.children.values import Packed
from rollout_engine.engine.calls import CallFuture
from rollout_engine.process import descriptors
from rollout_engine.process.client_outbox import ClientOutbox
from rollout_engine.process.core_endpoint import CoreEndpoint, LocalEndpoint, endpoint
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.keys import Keys
from rollout_engine.process.parts import Assembler
from rollout_engine.process.pending_calls import PendingCalls
from rollout_engine.process.waker import Waker
from rollout_engine.process.wire import (
    PROTOCOL,
    Call,
    Cancel,
    Decoder,
    Draining,
    Farewell,
    ForgetPictures,
    Goodbye,
    Hello,
    Limits,
    LiveVersion,
    Outputs,
    Ready,
    Refused,
    Rejected,
    Reply,
    ToClient,
    Welcome,
)
from sync.owner_process import OwnerProcess

logger = logging.getLogger("rollout_engine")

_LIMITS = Limits()
"""Largest messages that a client reads."""
_CONNECT_SECONDS = 10.0
_DISCONNECT_SECONDS = 5.0
"""How long zmq may take to notice the end of a connection, once the core's process is gone."""
_KILLED = " (SIGKILL, as the system sends it when memory runs out; no file of its last steps is left)"
_STATUS_SECONDS = 5.0
"""How long to wait for the exit status of a core's process that has closed its files."""


class ClientSocket:
    """A connection to a core: to the client's own (`start`), which ends with it, or to another's (`connect`)."""

    def __init__(self, core: CoreEndpoint, process: CoreProcess | None, hang_seconds: float) -> None:
        descriptors.require(descriptors.CLIENT_DESCRIPTORS, "A connection to a core")
        self._waker = Waker()
        try:
            self._link = core.connect()
        except BaseException:
            self._waker.close()
            raise
        self._signs = core.signs_of_life(self._link, hang_seconds)
        self.address, self._clock = core.address, core.clock
        self.dead_error: EngineDeadError | None = None
        """Why the core is gone; None while it lives."""
        self.draining = ""
        """Why the core takes no more requests and is about to end; "": it takes them."""
        self.client_index = self.policy_version = -1
        """`policy_version`: of the live weights and adapters, as last received."""
        self._on_message: Callable[[Outputs | Refused | Draining], None] = lambda _: None
        self._on_death: Callable[[EngineDeadError], None] = lambda _: None
        self._process, self._hang_seconds, self._step_deadline = process, hang_seconds, math.inf
        self.owner = OwnerProcess()
        """The process in which this client's thread runs."""
        self.limits = Limits()
        """Largest messages that the core reads."""
        self._assembler = Assembler(Decoder[ToClient](ToClient), _LIMITS)
        self._outbox = ClientOutbox(_LIMITS, core.clock)
        self._calls = PendingCalls()
        self._num_outputs = 0
        self._welcome: Future[Ready] = Future()
        self._closing = self._is_hung = False
        self._outbox.append(Hello(PROTOCOL, _LIMITS))
        self._thread = threading.Thread(target=self._run, name="core-client", daemon=True)
        try:
            start(self._thread)
        except RetryableError:
            self._release()
            raise

    @classmethod
    def start(cls, process: CoreProcess, *, hang_seconds: float) -> "ClientSocket":
        """Connect to a core's process that is ready; it ends with this client."""
        return cls(LocalEndpoint(process.directory), process, hang_seconds)

    @classmethod
    def connect(cls, address: str, *, keys: Keys | None = None, hang_seconds: float) -> "ClientSocket":
        """Connect to a core by its directory, or at a TCP address with keys; it continues when this client leaves.

        Raises `EngineDeadError`, `ConfigError` for an address that does not go with the keys, and `RetryableError`
        if this process or that core has no descriptor left.
        """
        return cls(endpoint(address, keys), None, hang_seconds)

    def wait_welcome(self) -> Ready:
        """Block until the core has answered. Raises `EngineDeadError`."""
        try:
            return self._welcome.result(_CONNECT_SECONDS)
        except TimeoutError:
            self.close()
            raise EngineDeadError(f"The core at {self.address} did not answer in {_CONNECT_SECONDS:g} s.") from None

    def listen(
        self, on_message: Callable[[Outputs | Refused | Draining], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """Set the listeners, which run on this client's thread. Call it before the first request is sent."""
        self._on_message, self._on_death = on_message, on_death

    def send(self, message: Any) -> None:
        """Queue a message. Raises `EngineDeadError` if the core is gone, `LifecycleError` in a forked child."""
        self.require_own_process()
        if self.dead_error is not None:
            raise self.dead_error
        self._outbox.append(message)
        self._waker.wake()

    def call(
        self, name: str, arguments: Packed, kind: Any, *, deadline: float | None = None, title: str = ""
    ) -> CallFuture:
        """Call a verb of the core whose result is of type `kind`. Raises `LifecycleError` in a forked child.

        `title` names the call in errors that are not the engine's own; default: `name`.
        """
        self.require_own_process()
        number, future = self._calls.add(title or name, kind)
        if not future.done():
            self._outbox.append(Call(number, name, arguments.body, arguments.arrays, deadline))
            self._waker.wake()
            future.add_done_callback(partial(self._take_back, number))
        return future

    def close(self) -> None:
        """Leave the core, or end it if it is ours. Calls in flight raise `EngineDeadError`."""
        if not self.owner.is_current or self._closing:
            return
        self._closing = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def require_own_process(self) -> None:
        """Raise `LifecycleError` in a forked child, which has no thread that sends."""
        if not self.owner.is_current:
            raise LifecycleError(self.owner.error_message("The connection to the engine"))

    def _take_back(self, number: int, future: Future[Any]) -> None:
        """Take a call back that its caller has cancelled."""
        if future.cancelled() and self.owner.is_current:
            self._calls.forget(number)
            self._outbox.append(Cancel(number))
            self._waker.wake()

    def _run(self) -> None:
        try:
            reason = self._serve()
        except Exception as problem:
            logger.exception("the client's thread failed")
            reason = f"the client's thread failed: {type(problem).__name__}: {problem}"
        self._die(reason)
        self._release()

    def _serve(self) -> str:
        """Send and receive until the connection ends. Returns why it ended."""
        poller = zmq.Poller()
        for source in (self._link.socket, self._link.monitor, self._waker):
            poller.register(source, zmq.POLLIN)
        lifeline = None if self._process is None else self._process.lifeline.socket
        if lifeline is not None:
            poller.register(lifeline, zmq.POLLIN)
        last_looked = time.monotonic()
        while not self._closing:
            events = dict(poller.poll(int(1000 * min(0.1, self._hang_seconds / 4))))
            if self._waker.fileno() in events:
                self._waker.drain()
            self._send_outbox()
            now = time.monotonic()
            stood_still = now - last_looked > self._hang_seconds / 2  # it was this thread that did, not the core
            self._signs.look(now, heard=stood_still or self._link.socket in events)
            last_looked = now
            farewell = self._receive() if self._link.socket in events else None
            if farewell is not None:
                return farewell
            if self._link.monitor in events or (lifeline is not None and lifeline.fileno() in events):
                return self._last_words()
            if silence := self._signs.silence(now, self._hang_seconds, self._step_deadline):
                self._is_hung = True
                is_alive = now - self._signs.alive_at <= self._hang_seconds
                return silence + ("" if self._process is None else self._process.keep_stacks(abort=is_alive))
        return "the engine was shut down"

    def _last_words(self) -> str:
        """Receive messages that the core sent before it ended. Returns its farewell, else how it ended."""
        status = None if self._process is None else self._process.wait(_STATUS_SECONDS)
        if status is not None:
            self._link.wait_until_lost(_DISCONNECT_SECONDS)
        farewell = self._receive()
        if farewell is not None or self._process is None:
            return farewell or self._link.why_lost()
        if status is None:
            return "its process cannot be reached"
        killed = _KILLED if status == -signal.SIGKILL else ""
        return f"its process has ended with status {status}{killed}{self._process.keep_stacks(abort=False)}"

    def _send_outbox(self) -> None:
        for answer in self._outbox.send(self._link, self.limits):
            self._take(answer)

    def _receive(self) -> str | None:
        """Take every message that has arrived. Returns the core's farewell, or an error in a message."""
        while (frames := self._link.receive()) is not None:
            try:
                message = self._assembler.read(frames)
                self._clock.adjust_times(message, time.monotonic())
                farewell = self._take(message)
            except WireError as problem:
                return f"it sent frames that are no message ({problem})"
            if farewell is not None:
                return farewell
        return None

    def _take(self, message: Any) -> str | None:
        match message:
            case Outputs(_, number):
                if number != self._num_outputs:
                    return f"outputs {self._num_outputs} to {number} of it are lost"
                self._num_outputs += 1
                self._on_message(message)
            case Refused():
                self._on_message(message)
            case Draining(reason):
                self.draining = reason
                self._on_message(message)
            case LiveVersion(policy_version):
                self.policy_version = policy_version
            case Reply():
                self._calls.resolve(message)
            case Welcome() if self._welcome.done():
                return "it welcomed this client twice"
            case Welcome(client_index, ready, limits):
                self.client_index, self.limits = client_index, limits
                self._outbox.vocab_size = ready.info.vocab_size
                self.policy_version = ready.policy_version
                self._step_deadline = ready.info.config.step_deadline or math.inf
                self._outbox.pictures = SentPictures(ready.info.config.mm_cache_bytes)
                self._outbox.num_routed_bytes = 0 if (found := ready.info.routing) is None else found.num_token_bytes
                self._outbox.num_hidden_bytes = num_state_bytes(ready.info.pooling)
                self._welcome.set_result(ready)
            case ForgetPictures():
                self._outbox.append(message)
                self._waker.wake()
            case Rejected(reason):
                logger.warning("the core rejected a message of this client: %s", reason)
            case Farewell(reason):
                return reason
        return None

    def _release(self) -> None:
        """Leave the core, or end it if it is ours: by closing its lifeline, and by a signal if it hangs."""
        if self._closing and self._process is None:
            self._outbox.append(Goodbye())
            self._outbox.send(self._link, self.limits)
        self._signs.close()
        self._link.close()
        if self._process is not None:
            self._process.end(kill=self._is_hung)
        self._waker.close()

    def _die(self, reason: str) -> None:
        error = EngineDeadError(f"The engine's core is gone: {reason}.{EngineDeadError.ADVICE}")
        if not self._welcome.done():
            error = EngineDeadError(f"No connection to the core at {self.address}: {reason}.")
        self.dead_error = error
        self._calls.fail_all(error)
        if not self._welcome.done():
            self._welcome.set_exception(error)
        self._on_death(error)
