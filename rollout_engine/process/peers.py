"""The clients of a core's ROUTER socket, each with a bounded backlog of messages that its pipe did not take at once."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from rollout_engine.children.failure import failure_of
from rollout_engine.children.values import Frame
from rollout_engine.engine.health import IoStats
from rollout_engine.process.client_routing import halves
from rollout_engine.process.parts import Assembler, in_parts
from rollout_engine.process.wire import (
    Decoder,
    Encoder,
    Farewell,
    Heartbeat,
    Limits,
    MessageTooLongError,
    Outputs,
    Reply,
    ToCore,
)

logger = logging.getLogger("rollout_engine")

_MAX_REMEMBERED = 4096
"""Clients that left, whose last messages may still be on their way."""
_LIMITS = Limits()
"""Largest messages that the core reads."""


class Peer:
    """One client as the core sees it."""

    def __init__(self, identity: bytes, index: int, limits: Limits, assembler: Assembler) -> None:
        self.identity, self.index = identity, index
        """`index` -1: a stranger, which has no backlog."""
        self.limits = limits
        """Limits on messages to the client."""
        self.assembler = assembler
        """Reads the client's messages."""
        self.num_outputs = 0
        """`Outputs` sent to it."""
        self.backlog: deque[list[Frame]] = deque()
        """Multiparts: a long message is many of them."""
        self.num_waiting_bytes = 0
        """Bytes of the backlog behind its first message, of which parts may have been sent."""
        self._messages: deque[list[int]] = deque()
        """Sizes of the multiparts of each message in the backlog, the last one first."""
        self.last_sent = 0.0

    def push_frames(self, multiparts: list[list[Frame]]) -> None:
        """Append the multiparts of a message to the backlog, those that are left to send."""
        self.backlog += multiparts
        sizes = [sum(map(len, frames)) for frames in reversed(multiparts)]
        self.num_waiting_bytes += sum(sizes) if self._messages else 0
        self._messages.append(sizes)

    def pop(self) -> None:
        """Remove the first multipart of the backlog."""
        self.backlog.popleft()
        self._messages[0].pop()
        if not self._messages[0]:
            self._messages.popleft()
            self.num_waiting_bytes -= sum(self._messages[0]) if self._messages else 0

    def clear(self) -> None:
        """Drop the backlog."""
        self.backlog.clear()
        self._messages.clear()
        self.num_waiting_bytes = 0


class Peers:
    """Connected clients, and the sending of messages to them. One thread only.

    Args:
        router: the ROUTER socket, with ROUTER_MANDATORY.
        stats: kept up to date.
        on_left: called with the index of a client that is gone, or was cut off because its backlog was full.
    """

    def __init__(
        self, router: zmq.Socket[bytes], stats: IoStats, on_left: Callable[[int], None], *, max_backlog_bytes: int
    ) -> None:
        self._router, self._stats, self._on_left = router, stats, on_left
        self._max_backlog_bytes = max_backlog_bytes
        self._encoder, self._decoder = Encoder(), Decoder[ToCore](ToCore)
        self._by_identity: dict[bytes, Peer] = {}
        self._by_index: dict[int, Peer] = {}
        self._leaving: list[Peer] = []
        self._left: deque[bytes] = deque(maxlen=_MAX_REMEMBERED)
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def has_backlog(self) -> bool:
        """Whether a connected client has a backlog."""
        return any(peer.backlog for peer in self._by_identity.values())

    @property
    def num_leaving(self) -> int:
        """Clients that were cut off and have not taken their farewell yet."""
        return len(self._leaving)

    def get(self, identity: bytes) -> Peer | None:
        """The connected client with this zmq identity."""
        return self._by_identity.get(identity)

    def has_left(self, identity: bytes) -> bool:
        """Whether a client with this zmq identity was connected not long ago."""
        return identity in self._left

    def stranger(self, identity: bytes) -> Peer:
        """A peer that has not said hello."""
        return self._peer(identity, -1, _LIMITS)

    def add(self, identity: bytes, limits: Limits) -> Peer:
        """Connect a client that takes messages within these limits, under the next index."""
        peer = self._peer(identity, self._num_added, limits)
        self._num_added += 1
        self._by_identity[identity] = self._by_index[peer.index] = peer
        self._stats.num_clients = len(self)
        return peer

    def forget(self, peer: Peer) -> None:
        """Disconnect a client and drop its backlog."""
        peer.clear()
        if self._by_identity.pop(peer.identity, None) is not None:
            del self._by_index[peer.index]
            self._left.append(peer.identity)
            self._stats.num_clients = len(self)
            self._on_left(peer.index)

    def send(self, peer: Peer, message: Any) -> None:
        """Send a message, or append it to the client's backlog. A full backlog ends the client."""
        if peer.num_waiting_bytes > self._max_backlog_bytes:
            return self._cut_off(peer, f"the client stopped reading: {peer.num_waiting_bytes} bytes wait for it")
        left: list[list[Frame]] = []
        try:
            for frames in self._multiparts(peer, message):
                sent = not (peer.backlog or left) and self._try_send(peer, frames)
                if not sent and peer.index >= 0:
                    left.append([bytes(frames[0]), *frames[1:]])
        except MessageTooLongError as problem:
            return self._cut_off(peer, f"a message to the client is too long: {problem}")
        if left:
            peer.push_frames(left)

    def send_to(self, index: int, message: Any) -> None:
        """Send a message to the client with this index; if it has left, the message is dropped."""
        if index in self._by_index:
            self.send(self._by_index[index], message)

    def send_all(self, message: Any) -> None:
        """Send a message to every client."""
        for peer in [*self._by_identity.values()]:
            self.send(peer, message)

    def send_heartbeats(self, silence: float) -> None:
        """Send a heartbeat to clients that were sent nothing for `silence` seconds. It shows which are gone, too."""
        now = time.monotonic()
        for peer in [*self._by_identity.values()]:
            if not peer.backlog and now - peer.last_sent >= silence:
                self.send(peer, Heartbeat(now))

    def retry(self) -> None:
        """Send as much of every backlog as the clients' pipes take now."""
        for peer in [*self._by_identity.values(), *self._leaving]:
            while peer.backlog and self._try_send(peer, peer.backlog[0]):
                if peer.backlog:  # empty if the client turned out to be gone
                    peer.pop()
        self._leaving = [peer for peer in self._leaving if peer.backlog]

    def _peer(self, identity: bytes, index: int, limits: Limits) -> Peer:
        return Peer(identity, index, limits, Assembler(self._decoder, _LIMITS))

    def _multiparts(self, peer: Peer, message: Any) -> Iterator[list[Frame]]:
        """Yield the zmq multiparts that carry a message, or of its replacement if it is too long."""
        if isinstance(message, Outputs):
            message = Outputs(message.steps, peer.num_outputs)
        try:
            multiparts = in_parts(self._encoder.encode(message), peer.limits)
        except MessageTooLongError as problem:
            for each in _in_place_of(message, problem):
                yield from self._multiparts(peer, each)
            return
        peer.num_outputs += isinstance(message, Outputs)
        yield from multiparts

    def _try_send(self, peer: Peer, frames: Sequence[Frame]) -> bool:
        """Return False if the client's pipe is full. A client that is gone is forgotten."""
        try:
            self._router.send(peer.identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # no such peer any more
            self.forget(peer)
            return True
        *others, last = frames
        for frame in others:
            self._router.send(frame, zmq.SNDMORE, copy=frame is frames[0])
        self._router.send(last, 0, copy=last is frames[0])
        peer.last_sent = time.monotonic()
        return True

    def _cut_off(self, peer: Peer, reason: str) -> None:
        self._stats.num_clients_cut_off += 1
        logger.warning("client %d was cut off: %s", peer.index, reason)
        self.forget(peer)
        peer.push_frames([[bytes(frame) for frame in self._encoder.encode(Farewell(reason))]])
        self._leaving.append(peer)


def _in_place_of(message: Any, problem: MessageTooLongError) -> list[Any]:
    """Replace a message that is too long: an error for a result, shorter messages for outputs."""
    match message:
        case Reply(number):
            return [Reply(number, failure=failure_of(MessageTooLongError(f"its result cannot be sent: {problem}")))]
        case Outputs([step]) if len(parts := halves(step)) > 1:
            return [Outputs([part]) for part in parts]
        case Outputs(steps) if len(steps) > 1:
            return [Outputs(steps[: len(steps) // 2]), Outputs(steps[len(steps) // 2 :])]
        case _:
            raise problem
