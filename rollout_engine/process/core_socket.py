"""The core's end of the socket, on a thread of its own: a long step delays neither heartbeats nor incoming messages.

    clients ──frames──> ROUTER ──> inbox ──────────────> busy loop
            <─frames───        <── outbox, one waker <──

The lifeline is a socket whose other end the parent process holds. When it closes, the parent has died, and the core
ends too.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from rollout_engine.base import threads
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.metrics import PictureStats
from rollout_engine.children.failure import WireError
from rollout_engine.children.values import Frame
from rollout_engine.engine.health import IoStats
from rollout_engine.process.authentication import Authenticator, make_token
from rollout_engine.process.core_launcher import address_in
from rollout_engine.process.descriptors import MOST_CONNECTIONS, Connections
from rollout_engine.process.inbox import ClientLeft, FromClient, Inbox, Stop
from rollout_engine.process.keys import Keys
from rollout_engine.process.parts import receive
from rollout_engine.process.peers import Peers
from rollout_engine.process.picture_pieces import PictureIntake
from rollout_engine.process.strangers import GREETING, Strangers
from rollout_engine.process.tcp_address import listen_on
from rollout_engine.process.waker import Waker
from rollout_engine.process.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    Call,
    Cancel,
    Draining,
    Farewell,
    ForgetPictures,
    Goodbye,
    Hello,
    Ready,
    Rejected,
    Welcome,
)

logger = logging.getLogger("rollout_engine")

_READ_AT_ONCE = 256
"""Messages that are read before the thread sends those that wait."""
_ABORT_AT_ONCE = 4096
"""Sequences that one message of the inbox aborts at most."""
_RETRY_SECONDS = 0.01
"""How often a backlog, or a full inbox, is tried again."""
_FLUSH_SECONDS = 2.0
"""How long `close` waits at most for clients to take their last messages."""
_ORPHAN_SECONDS = 0.5
"""How long the busy loop may take to end once the parent has died."""


class CoreSocket:
    """Runs the ROUTER socket. `send` and `close` may be called by other threads."""

    def __init__(
        self,
        directory: str,
        lifeline: socket.socket,
        *,
        heartbeat_seconds: float,
        max_backlog_bytes: int,
        connections: Connections = MOST_CONNECTIONS,
        listen: str = "",
        keys: Keys | None = None,
    ) -> None:
        """Take clients in `directory`, and at the TCP address `listen` those with the keys. Raises `ConfigError`."""
        self._max_clients = connections.num_clients
        self.inbox = Inbox()
        self.cancelled: set[tuple[int, int]] = set()
        """(client, number) of calls that were cancelled by a message that is still in the inbox."""
        self.gone: set[int] = set()
        """Clients that have left, as long as the inbox has no notice of it yet: their messages there are void."""
        self.stats, self.picture_stats = IoStats(), PictureStats()
        self._pictures = PictureIntake(self.picture_stats, lambda index: self.send(index, ForgetPictures()))
        self.on_turn: Callable[[], None] = lambda: None
        """Called at every turn of the loop, at least once a heartbeat."""
        self.answer: Callable[[int, Call], bool] = lambda client_index, call: False
        """Answers a call at once, on this thread; False: it is for the inbox."""
        self.on_cancel: Callable[[int, int | None], None] = lambda client_index, number: None
        """Called on this thread with the number of a cancelled call, and with None for a client that has left."""
        self._directory, self._lifeline, self._parent = directory, lifeline, os.getppid()
        self._heartbeat_seconds = heartbeat_seconds
        self._ready: Callable[[], Ready] | None = None
        self._outbox: deque[tuple[int | None, Any]] = deque()
        """(client, message); None: all clients."""
        self._draining = ""
        """Why no more clients are welcome; "": they are."""
        self._farewell: str | None = None
        self._orphaned_at: float | None = None
        self._waker = Waker()
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, int(_FLUSH_SECONDS * 1000))
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(zmq.RCVHWM, 64)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._authenticator = Authenticator(self._context, make_token(directory), keys)
        self._authenticator.guard(self._router)
        self._router.bind(address_in(directory))
        self._strangers = Strangers(self._context, self._router, connections.num_strangers)
        self.address = ""
        """The TCP address on which it listens."""
        if listen:
            self.address = self._listen(listen, keys)
        self._peers = Peers(self._router, self.stats, self._on_left, max_backlog_bytes=max_backlog_bytes)
        self._thread = threading.Thread(target=self._run, name="core-socket", daemon=True)

    def start(self, ready: Callable[[], Ready], on_orphaned: Callable[[], None]) -> None:
        """Start to serve clients. `on_orphaned` runs if the busy loop does not end soon after the parent has.

        Raises `RetryableError` if the system starts no more threads.
        """
        self._ready, self._on_orphaned = ready, on_orphaned
        threads.start(self._thread)

    @property
    def is_orphaned(self) -> bool:
        """Whether the parent has died, or has closed its end of the lifeline."""
        return self._orphaned_at is not None

    def send(self, client_index: int, message: Any) -> None:
        """Queue a message for a client; if it has left, the message is dropped."""
        self._outbox.append((client_index, message))
        self._waker.wake()

    def send_all(self, message: Any) -> None:
        """Queue a message for every client."""
        self._outbox.append((None, message))
        self._waker.wake()

    def drain(self, reason: str) -> None:
        """Notify every client that the core is about to end, and turn new ones away."""
        self._draining = reason
        self.send_all(Draining(reason))

    def close(self, reason: str) -> None:
        """Send queued messages and a farewell to every client, and end the thread."""
        self._farewell = reason
        self._waker.wake()
        self._thread.join()
        self._free()

    def _listen(self, listen: str, keys: Keys | None) -> str:
        assert keys is not None, "checked by whoever starts a core"
        self._authenticator.guard_tcp(self._router, keys)
        try:
            return listen_on(self._router, listen)
        except ConfigError:
            self._free()
            raise

    def _free(self) -> None:
        self._router.unbind(address_in(self._directory))
        if self.address:
            self._router.unbind(self.address)
        self._strangers.close()
        self._router.close()
        self._authenticator.close()
        self._context.term()
        self._waker.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as problem:
            logger.critical("the core's socket failed", exc_info=problem)
            self.inbox.put_first(Stop(f"its socket failed: {type(problem).__name__}: {problem}", is_failure=True))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)
        poller.register(self._authenticator.socket, zmq.POLLIN)
        poller.register(self._strangers.socket, zmq.POLLIN)
        next_beat = 0.0
        while self._farewell is None:
            poller.register(self._router, 0 if self.inbox.is_full else zmq.POLLIN)
            events = dict(poller.poll(self._timeout_ms(next_beat)))
            self.on_turn()
            if self._waker.fileno() in events:
                self._waker.drain()
            self._authenticator.answer()
            if self._strangers.socket in events:
                self._strangers.look()
            self._send_outbox()
            if self._router in events:
                self._receive()
            if self._orphaned_at is not None or self._lifeline.fileno() in events or os.getppid() != self._parent:
                self._stop_orphaned(poller)
            now = time.monotonic()
            if now >= next_beat:
                self._peers.send_heartbeats(self._heartbeat_seconds / 2)
                next_beat = now + self._heartbeat_seconds
            self._peers.retry()
        self._send_outbox()
        self._say_farewell(self._farewell)

    def _timeout_ms(self, next_beat: float) -> int:
        is_waiting = self._peers.has_backlog or self._peers.num_leaving or self._orphaned_at is not None
        is_waiting |= self.inbox.is_full
        return int(1000 * (_RETRY_SECONDS if is_waiting else max(next_beat - time.monotonic(), 0.0)))

    def _receive(self) -> None:
        for _ in range(_READ_AT_ONCE):
            if self.inbox.is_full:
                return
            try:
                identity, *frames = receive(self._router)
            except zmq.Again:
                return
            if frames == [GREETING]:
                self._strangers.greet(identity)
            else:
                self._take(identity, frames)

    def _take(self, sender: Frame, frames: Sequence[Frame]) -> None:
        identity = bytes(sender)
        peer = self._peers.get(identity)
        try:
            message = (peer or self._peers.stranger(identity)).assembler.read(frames)
            if message is None and peer is not None:
                return
            if peer is None and self._peers.has_left(identity) and not isinstance(message, Hello):
                return
            if isinstance(message, Hello) == (peer is not None):
                raise WireError("say hello first, once")
            if peer is not None and (message := self._pictures.read(peer.index, message)) is None:
                return
        except WireError as problem:
            self.stats.num_rejected += 1
            self._peers.send(peer or self._peers.stranger(identity), Rejected(str(problem)[:500]))
            return
        if peer is None:
            self._welcome(identity, message)
            if self._peers.get(identity) is not None:
                self._strangers.greet(sender)
        elif isinstance(message, Goodbye):
            self._peers.forget(peer)
        else:
            if isinstance(message, Cancel):
                self.cancelled.add((peer.index, message.number))
                self.on_cancel(peer.index, message.number)
            if isinstance(message, Call) and self.answer(peer.index, message):
                return
            num_bytes = peer.assembler.num_bytes
            for part in _parts(message):
                self.inbox.put(FromClient(peer.index, part), num_bytes)
                num_bytes = 0

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            reason = f"the core speaks protocol {PROTOCOL}, the client {hello.protocol}"
            self._peers.send(self._peers.stranger(identity), Farewell(reason))
        elif self._draining:
            reason = f"the core is about to end ({self._draining}) and takes no more clients"
            self._peers.send(self._peers.stranger(identity), Farewell(reason))
        elif len(self._peers) >= self._max_clients:
            reason = f"the core has {self._max_clients} clients already, as many as its file descriptors allow"
            self._peers.send(self._peers.stranger(identity), Farewell(reason))
        else:
            assert self._ready is not None, "started"
            peer, ready = self._peers.add(identity, hello.limits), self._ready()
            self._pictures.add_client(peer.index, ready.info.config.mm_cache_bytes)
            self._peers.send(peer, Welcome(peer.index, ready, clock=time.monotonic()))

    def _on_left(self, client_index: int) -> None:
        self.gone.add(client_index)
        self._pictures.drop_client(client_index)
        self.on_cancel(client_index, None)
        self.inbox.put(ClientLeft(client_index))

    def _send_outbox(self) -> None:
        while self._outbox:
            client_index, message = self._outbox.popleft()
            if client_index is None:
                self._peers.send_all(message)
            else:
                self._peers.send_to(client_index, message)

    def _stop_orphaned(self, poller: zmq.Poller) -> None:
        """Notify the busy loop that the parent has died; if it does not end in time, call `on_orphaned`."""
        now = time.monotonic()
        if self._orphaned_at is None:
            self._orphaned_at = now
            poller.unregister(self._lifeline)  # a closed socket is readable indefinitely
            self.inbox.put_first(Stop("the process that started the core has died"))
        elif now - self._orphaned_at > _ORPHAN_SECONDS:
            self._on_orphaned()

    def _say_farewell(self, reason: str) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        self._peers.send_all(Farewell(reason))
        while self._peers.has_backlog and time.monotonic() < deadline:
            self._peers.retry()
            time.sleep(_RETRY_SECONDS)


def _parts(message: Any) -> Iterable[Any]:
    """Divide an abort of many sequences into parts, between which the busy loop may compute a step."""
    if not isinstance(message, Abort) or len(message.sequence_ids) <= _ABORT_AT_ONCE:
        return [message]
    ids = message.sequence_ids
    return [Abort(ids[start : start + _ABORT_AT_ONCE]) for start in range(0, len(ids), _ABORT_AT_ONCE)]
