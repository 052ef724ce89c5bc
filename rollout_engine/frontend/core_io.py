"""The core's end of the socket, on a thread of its own: a long step delays neither heartbeats nor what comes in.

    clients ──frames──> ROUTER ──> inbox ──────────────> busy loop
            <─frames───        <── outbox, one waker <──

A client that stops reading is served from a backlog of bounded size, and cut off when that is full. The lifeline is a
socket whose other end the parent holds: when it closes the parent has died, and so does this process.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from rollout_engine.frontend.waker import Waker
from rollout_engine.frontend.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Decoder,
    Encoder,
    Farewell,
    Frame,
    Goodbye,
    Heartbeat,
    Hello,
    IoStats,
    Ready,
    Rejected,
    ToCore,
    Welcome,
    WireError,
)

logger = logging.getLogger("rollout_engine")

MAX_CLIENTS = 1024
_MAX_WAITING = 4096
"""Messages that may wait for the busy loop before the socket is left unread."""
_MAX_REMEMBERED = 4096
"""Clients that left, whose last messages may still be on their way."""
_RETRY_SECONDS = 0.01
"""How often a backlog is tried again."""
_FLUSH_SECONDS = 2.0
"""How long the end waits at most for clients to take their last messages."""
_ORPHAN_SECONDS = 0.5
"""How long the busy loop may take to end once the parent has died."""


class FromClient(msgspec.Struct, frozen=True):
    """A message for the busy loop, and whose it is."""

    client_index: int
    message: Any


class ClientLeft(msgspec.Struct, frozen=True):
    """A client is gone, or has been cut off: nobody waits for its requests."""

    client_index: int


class Hold(msgspec.Struct, frozen=True):
    """Stand still between two steps while another thread works on what steps use; a context manager for it."""

    inbox: Any
    reached: threading.Event = msgspec.field(default_factory=threading.Event)
    released: threading.Event = msgspec.field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self.inbox.put(self)
        self.reached.wait()

    def __exit__(self, *_: object) -> None:
        self.released.set()


class Do(msgspec.Struct, frozen=True):
    """Call something between two steps."""

    action: Callable[[], None]


class Stop(msgspec.Struct, frozen=True):
    """End the process."""

    reason: str


class Peer:
    """One client as the core sees it."""

    def __init__(self, identity: bytes, index: int) -> None:
        self.identity, self.index = identity, index
        self.backlog: deque[list[Frame]] = deque()
        self.num_backlog_bytes = 0
        self.last_sent = 0.0


class CoreIO:
    """Runs the ROUTER socket. `send` and `close` may be called by one other thread."""

    def __init__(
        self, address: str, lifeline: socket.socket, *, heartbeat_seconds: float, max_backlog_bytes: int
    ) -> None:
        self.inbox: queue.SimpleQueue[FromClient | ClientLeft | Hold | Do | Stop] = queue.SimpleQueue()
        self.stats = IoStats()
        self._lifeline, self._parent = lifeline, os.getppid()
        self._heartbeat_seconds, self._max_backlog_bytes = heartbeat_seconds, max_backlog_bytes
        self._ready: Callable[[], Ready] | None = None
        self._encoder, self._decoder = Encoder(), Decoder[ToCore](ToCore)
        self._outbox: deque[tuple[int, Any]] = deque()
        self._peers: dict[bytes, Peer] = {}
        self._by_index: dict[int, Peer] = {}
        self._leaving: list[Peer] = []
        self._left: deque[bytes] = deque(maxlen=_MAX_REMEMBERED)
        self._num_welcomed = 0
        self._farewell: str | None = None
        self._orphaned_at: float | None = None
        self._waker = Waker()
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, int(_FLUSH_SECONDS * 1000))
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(zmq.RCVHWM, 256)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.bind(address)
        self._thread = threading.Thread(target=self._run, name="core-io", daemon=True)

    def start(self, ready: Callable[[], Ready], on_orphaned: Callable[[], None]) -> None:
        """Serve clients from now on. `on_orphaned` runs when the busy loop does not end soon after the parent did."""
        self._ready, self._on_orphaned = ready, on_orphaned
        self._thread.start()

    def send(self, client_index: int, message: Any) -> None:
        """Queue a message for a client; one that has left gets nothing."""
        self._outbox.append((client_index, message))
        self._waker.wake()

    def close(self, reason: str) -> None:
        """Deliver what is queued, say farewell to every client, and end the thread."""
        self._farewell = reason
        self._waker.wake()
        self._thread.join()
        self._router.close()
        self._context.term()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        next_beat = 0.0
        while self._farewell is None:
            events = dict(poller.poll(self._timeout(next_beat)))
            if self._waker.fileno() in events:
                self._waker.drain()
            self._send_outbox()
            if self._router in events:
                self._receive()
            if self._orphaned_at is not None or self._lifeline.fileno() in events or os.getppid() != self._parent:
                self._be_orphaned(poller)
            now = time.monotonic()
            if now >= next_beat:
                self._beat(now)
                next_beat = now + self._heartbeat_seconds
            self._retry()
        self._send_outbox()
        self._say_farewell()

    def _timeout(self, next_beat: float) -> float:
        """Milliseconds."""
        waiting = any(peer.backlog for peer in self._peers.values()) or self._leaving or self._orphaned_at is not None
        return 1000 * (_RETRY_SECONDS if waiting else max(next_beat - time.monotonic(), 0.0))

    def _receive(self) -> None:
        for _ in range(_MAX_WAITING // 16):
            if self.inbox.qsize() >= _MAX_WAITING:
                time.sleep(_RETRY_SECONDS)
                return
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(identity.bytes, [frame.buffer for frame in frames])

    def _take(self, identity: bytes, frames: Sequence[Frame]) -> None:
        peer = self._peers.get(identity)
        try:
            message = self._decoder.decode(frames)
            if peer is None and identity in self._left and not isinstance(message, Hello):
                return
            if isinstance(message, Hello) == (peer is not None):
                raise WireError("say hello first, once")
        except WireError as problem:
            self.stats.num_rejected += 1
            self._send(peer or Peer(identity, -1), Rejected(str(problem)[:500]))
            return
        if peer is None:
            self._welcome(identity, message)
        elif isinstance(message, Goodbye):
            self._forget(peer)
        else:
            self.inbox.put(FromClient(peer.index, message))

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        peer = Peer(identity, self._num_welcomed)
        if hello.protocol != PROTOCOL:
            self._send(peer, Farewell(f"the core speaks protocol {PROTOCOL}, the client {hello.protocol}"))
        elif len(self._peers) >= MAX_CLIENTS:
            self._send(peer, Farewell(f"the core has {MAX_CLIENTS} clients already"))
        else:
            assert self._ready is not None, "started"
            self._num_welcomed += 1
            self._peers[identity] = self._by_index[peer.index] = peer
            self.stats.num_clients = len(self._peers)
            self._send(peer, Welcome(peer.index, self._ready()))

    def _send_outbox(self) -> None:
        while self._outbox:
            client_index, message = self._outbox.popleft()
            if client_index in self._by_index:
                self._send(self._by_index[client_index], message)

    def _send(self, peer: Peer, message: Any) -> None:
        frames = self._encoder.encode(message)
        if peer.backlog or not self._try_send(peer, frames):
            self._put_back(peer, [bytes(frame) for frame in frames])

    def _try_send(self, peer: Peer, frames: Sequence[Frame]) -> bool:
        """False: the client's pipe is full. A client that is gone is forgotten."""
        try:
            self._router.send(peer.identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # no such peer any more
            self._forget(peer)
            return True
        *others, last = frames
        for frame in others:
            self._router.send(frame, zmq.SNDMORE, copy=frame is frames[0])
        self._router.send(last, copy=last is frames[0])
        peer.last_sent = time.monotonic()
        return True

    def _put_back(self, peer: Peer, frames: list[Frame]) -> None:
        if peer.index < 0:
            return  # a stranger's
        peer.backlog.append(frames)
        peer.num_backlog_bytes += sum(map(len, frames))
        if peer.num_backlog_bytes > self._max_backlog_bytes:
            self._cut_off(peer)

    def _cut_off(self, peer: Peer) -> None:
        self.stats.num_clients_cut_off += 1
        reason = f"the client stopped reading: {peer.num_backlog_bytes} bytes wait for it"
        logger.warning("client %d was cut off: %s", peer.index, reason)
        self._forget(peer)
        peer.backlog = deque([[bytes(frame) for frame in self._encoder.encode(Farewell(reason))]])
        self._leaving.append(peer)

    def _retry(self) -> None:
        for peer in [*self._peers.values(), *self._leaving]:
            while peer.backlog and self._try_send(peer, peer.backlog[0]):
                if peer.backlog:
                    peer.num_backlog_bytes -= sum(map(len, peer.backlog.popleft()))
        self._leaving = [peer for peer in self._leaving if peer.backlog]

    def _forget(self, peer: Peer) -> None:
        peer.backlog.clear()
        if self._peers.pop(peer.identity, None) is not None:
            del self._by_index[peer.index]
            self._left.append(peer.identity)
            self.stats.num_clients = len(self._peers)
            self.inbox.put(ClientLeft(peer.index))

    def _beat(self, now: float) -> None:
        """A sign of life for those that have heard nothing lately; it also finds out who is gone."""
        for peer in [*self._peers.values()]:
            if not peer.backlog and now - peer.last_sent >= self._heartbeat_seconds / 2:
                self._send(peer, Heartbeat())

    def _be_orphaned(self, poller: zmq.Poller) -> None:
        now = time.monotonic()
        if self._orphaned_at is None:
            self._orphaned_at = now
            poller.unregister(self._lifeline)  # readable for ever
            self.inbox.put(Stop("the process that started the core has died"))
        elif now - self._orphaned_at > _ORPHAN_SECONDS:
            self._on_orphaned()

    def _say_farewell(self) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        for peer in [*self._peers.values()]:
            self._send(peer, Farewell(self._farewell or ""))
        while any(peer.backlog for peer in self._peers.values()) and time.monotonic() < deadline:
            self._retry()
            time.sleep(_RETRY_SECONDS)
