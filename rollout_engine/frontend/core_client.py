"""A client's end of the socket to a core, on a thread of its own; any other thread may send and call.

What arrives is handed on from that thread: outputs and refusals to one listener, and once, when the core is gone for
whatever reason, an `EngineDeadError` to another. The core is gone when its lifeline closes, its connection drops, it
says farewell, it is silent for `hang_seconds`, or it says what makes no sense.
"""

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from rollout_engine.errors import EngineDeadError, LifecycleError, RequestError
from rollout_engine.frontend.lifeline import CoreProcess, address_in
from rollout_engine.frontend.waker import Waker
from rollout_engine.frontend.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    AddRequest,
    Call,
    Decoder,
    Encoder,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    Outputs,
    Ready,
    Refused,
    Rejected,
    Reply,
    RpcCall,
    ToClient,
    Welcome,
    WireError,
    failure_of,
    pack,
    unpack,
)
from sync.own_process import OwnProcess

logger = logging.getLogger("rollout_engine")

HEARTBEAT_SECONDS = 0.5
MAX_BACKLOG_BYTES = 64 << 20
"""Bytes that may wait for a client that does not read, before the core cuts it off."""
_CONNECT_SECONDS = 10.0
_LAST_WORDS_SECONDS = 5.0
"""How long the end of a connection may take to be noticed, once the other end's process is gone."""
_NEVER_MS = 1 << 30
_STATUS_SECONDS = 5.0
"""How long open requests wait at most to learn how the core's process ended: it has closed its files, and is ending."""


class CoreClient:
    """Connection to a core: its own (`start`), which ends with it, or somebody else's (`connect`)."""

    def __init__(self, directory: str, process: CoreProcess | None, hang_seconds: float) -> None:
        self.directory = directory
        self.dead_error: EngineDeadError | None = None
        """Why the core is gone; None while it lives."""
        self.client_index = -1
        self._on_message: Callable[[Outputs | Refused], None] = _ignore
        self._on_death: Callable[[EngineDeadError], None] = _ignore
        self._process, self._hang_seconds = process, hang_seconds
        self.owner = OwnProcess()
        """The process whose thread serves this client."""
        self._encoder, self._decoder = Encoder(), Decoder[ToClient](ToClient)
        self._outbox: deque[Any] = deque()
        self._calls: dict[int, tuple[str, Callable[[Reply], Any], Future[Any]]] = {}
        self._lock = threading.Lock()
        """Over `_calls` and `dead_error`: no call is entered once the dead ones were told."""
        self._numbers = itertools.count()
        self._num_outputs = 0
        self._welcome: Future[Ready] = Future()
        self._closing = self._is_hung = False
        self._waker = Waker()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by what callers wait for
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # A core that is gone does not come back; but "never" (-1) would drop what came before it went and is not read.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address_in(directory))
        self._outbox.append(Hello(PROTOCOL))
        self._thread = threading.Thread(target=self._run, name="core-client", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, process: CoreProcess, *, hang_seconds: float) -> "CoreClient":
        """Connect to a process that is ready; it ends with this client."""
        return cls(process.directory, process, hang_seconds)

    @classmethod
    def connect(cls, directory: str, *, hang_seconds: float) -> "CoreClient":
        """Join the core that lives in `directory`; it goes on when this client leaves."""
        if not os.path.exists(f"{directory}/core"):
            raise EngineDeadError(
                f"No core lives in {directory}: give the `address` of an AsyncLLM that runs on this machine."
            )
        return cls(directory, None, hang_seconds)

    def wait_welcome(self) -> Ready:
        """Block until the core has answered. Raises `EngineDeadError`."""
        try:
            return self._welcome.result(_CONNECT_SECONDS)
        except TimeoutError:
            self.close()
            raise EngineDeadError(f"The core in {self.directory} did not answer in {_CONNECT_SECONDS:g} s.") from None

    def listen(
        self, on_message: Callable[[Outputs | Refused], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """Whom to tell, on this client's thread. Before the first request is sent there is nothing to tell."""
        self._on_message, self._on_death = on_message, on_death

    def send(self, message: Any) -> None:
        """Queue a message. Raises `EngineDeadError` when the core is gone, `LifecycleError` in a forked child."""
        self.require_own_process()
        if self.dead_error is not None:
            raise self.dead_error
        self._outbox.append(message)
        self._waker.wake()

    def abort(self, sequences: list[int]) -> None:
        """End sequences; without a core there is nothing to end."""
        if sequences and self.dead_error is None:
            self.send(Abort(sequences))

    def call(self, name: str, kind: Any = None, **arguments: Any) -> Future[Any]:
        """Call a registered utility; the future gives its result as `kind`, or raises what it raised.

        Raises, before a byte is sent, `TypeError` for an argument that has no place on the wire, `RequestError` for a
        number or a text that has none.
        """
        try:
            packed = pack(arguments)
        except (OverflowError, UnicodeEncodeError) as problem:
            raise _unsendable(name, problem) from None
        return self.ask(name, lambda reply: unpack(reply.result, kind), lambda number: Call(number, name, packed))

    def ask(self, name: str, read: Callable[[Reply], Any], make: Callable[[int], Any]) -> Future[Any]:
        """Send `make(number)`; what `read` makes of its `Reply` resolves the future. `LifecycleError` as in `send`."""
        self.require_own_process()
        future: Future[Any] = Future()
        with self._lock:
            if self.dead_error is not None:
                future.set_exception(self.dead_error)
                return future
            number = next(self._numbers)
            self._calls[number] = (name, read, future)
        self._outbox.append(make(number))
        self._waker.wake()
        return future

    def close(self) -> None:
        """Leave the core, or end it if it is ours. Calls in flight raise `EngineDeadError`."""
        if not self.owner.is_here or self._closing:
            return
        self._closing = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def require_own_process(self) -> None:
        """Raise `LifecycleError` in a forked child, where nobody would send anything."""
        if not self.owner.is_here:
            raise LifecycleError(self.owner.explain("The connection to the engine"))

    def _run(self) -> None:
        try:
            reason = self._serve()
        except Exception as problem:
            logger.exception("the client's thread failed")
            reason = f"the client's thread failed: {type(problem).__name__}: {problem}"
        self._die(reason)
        self._release()

    def _serve(self) -> str:
        """Returns why it ended."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._waker):
            poller.register(source, zmq.POLLIN)
        if self._process is not None:
            poller.register(self._process.lifeline.socket, zmq.POLLIN)
        last_heard = last_looked = time.monotonic()
        while not self._closing:
            events = dict(poller.poll(1000 * min(0.1, self._hang_seconds / 4)))
            if self._waker.fileno() in events:
                self._waker.drain()
            self._send_outbox()
            now = time.monotonic()
            if self._socket in events or now - last_looked > self._hang_seconds / 2:
                last_heard = now  # or this thread was the one that stood still
            last_looked = now
            farewell = self._receive() if self._socket in events else None
            if farewell is not None:
                return farewell
            if self._process is not None and self._process.lifeline.socket.fileno() in events:
                return self._last_words()
            if self._monitor in events:
                return self._last_words()
            if now - last_heard > self._hang_seconds:
                self._is_hung = True
                return f"it has given no sign of life for {self._hang_seconds:g} s"
        return "the engine was shut down"

    def _last_words(self) -> str:
        """What the core had still to say, or what became of it. What it sent comes before its connection ends."""
        status = None if self._process is None else self._process.wait(_STATUS_SECONDS)
        if status is not None:
            self._monitor.poll(1000 * _LAST_WORDS_SECONDS)
        farewell = self._receive()
        if farewell is not None or self._process is None:
            return farewell or "its connection is lost"
        return "its process cannot be reached" if status is None else f"its process has ended with status {status}"

    def _send_outbox(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            try:
                first, *others = frames = self._encoder.encode(message)
            except (TypeError, ValueError, OverflowError) as problem:
                self._give_up(message, problem)
                continue
            self._socket.send(first, zmq.SNDMORE if others else 0)
            for i, frame in enumerate(others, start=2):
                self._socket.send(frame, zmq.SNDMORE if i < len(frames) else 0, copy=False)

    def _give_up(self, message: Any, problem: Exception) -> None:
        """A message that cannot be sent: who wanted that is told, and nobody else."""
        match message:
            case AddRequest(request):
                self._on_message(Refused(request.first_sequence, failure_of(_unsendable("generate", problem))))
            case Call(number, name) | RpcCall(number, name):
                self._resolve(Reply(number, failure=failure_of(_unsendable(name, problem))))
            case _:
                raise problem

    def _receive(self) -> str | None:
        """Everything that has arrived. Returns the core's farewell, or what was wrong."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return None
            try:
                farewell = self._take(self._decoder.decode([frame.buffer for frame in frames]))
            except WireError as problem:
                return f"it said what is no message ({problem})"
            if farewell is not None:
                return farewell

    def _take(self, message: Any) -> str | None:
        match message:
            case Outputs(number):
                if number != self._num_outputs:
                    return f"outputs {self._num_outputs} to {number} of it are lost"
                self._num_outputs += 1
                self._on_message(message)
            case Refused():
                self._on_message(message)
            case Reply():
                self._resolve(message)
            case Welcome() if self._welcome.done():
                return "it welcomed this client twice"
            case Welcome(client_index, ready):
                self.client_index = client_index
                self._welcome.set_result(ready)
            case Rejected(reason):
                logger.warning("the core rejected a message of this client: %s", reason)
            case Farewell(reason):
                return reason
            case Heartbeat():
                pass
        return None

    def _resolve(self, reply: Reply) -> None:
        with self._lock:
            name, read, future = self._calls.pop(reply.number, ("", _ignore, Future()))
        if not future.set_running_or_notify_cancel():
            return
        try:
            if reply.failure is not None:
                raise reply.failure.as_error(name)
            future.set_result(read(reply))
        except Exception as error:
            future.set_exception(error)

    def _release(self) -> None:
        """Leave the core, or end it if it is ours: told to by its lifeline, killed if it hears nothing any more."""
        if self._closing and self._process is None:
            self._socket.send(self._encoder.encode(Goodbye())[0])
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        if self._process is not None:
            self._process.end(kill=self._is_hung)
        self._waker.close()

    def _die(self, reason: str) -> None:
        error = EngineDeadError(f"The engine's core is gone: {reason}. Make a new engine.")
        with self._lock:
            self.dead_error = error
            calls, self._calls = self._calls, {}
        for _, _, future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if not self._welcome.done():
            self._welcome.set_exception(error)
        self._on_death(error)


def _unsendable(name: str, problem: Exception) -> RequestError:
    return RequestError(f"{name}: an argument cannot be sent to the engine's process: {problem}.", field="arguments")


def _ignore(_: Any) -> None:
    """Until the owner has said what it wants to hear."""
