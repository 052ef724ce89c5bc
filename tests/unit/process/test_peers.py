"""Bounds on what waits for a client behind the message that is on its way, however long that one is."""

import numpy as np
import pytest
import zmq

from rollout_engine.base.messages import EngineCoreOutputs, PromptLogprobs
from rollout_engine.engine.health import IoStats
from rollout_engine.process.peers import Peers
from rollout_engine.process.wire import Limits, Outputs, Reply

LONG = Outputs([EngineCoreOutputs(0, prompt_logprobs={0: PromptLogprobs(np.zeros(1 << 20, np.float32))})])
"""Four parts, and a fifth with the little that is left."""


class Pipe:
    """The socket of the core: its client takes `room` more multiparts."""

    def __init__(self, room):
        self.room, self.num_sent = room, 0

    def send(self, frame, flags=0, copy=True):
        if flags == zmq.SNDMORE | zmq.NOBLOCK:  # the identity, ahead of a multipart
            if self.num_sent == self.room:
                raise zmq.Again
            self.num_sent += 1


@pytest.fixture
def pipe():
    return Pipe(room=1)


@pytest.fixture
def left():
    """Clients that have left."""
    return []


@pytest.fixture
def peers(pipe, left):
    return Peers(pipe, IoStats(), left.append, max_backlog_bytes=1 << 20)


@pytest.fixture
def peer(peers):
    return peers.add(b"client", Limits())


def small(number):
    return Reply(number, arrays=[np.zeros(100_000, np.uint8)])


def test_a_long_message_leaves_its_client_as_much_room_as_a_short_one(peers, peer, pipe, left):
    peers.send(peer, LONG)
    assert pipe.num_sent == 1 and len(peer.backlog) == 4 and peer.num_waiting_bytes == 0
    for number in range(10):
        peers.send(peer, small(number))
    assert not left and 1_000_000 < peer.num_waiting_bytes < 1 << 20
    peers.send(peer, small(10))
    peers.send(peer, small(11))
    assert left == [0] and peers.num_leaving == 1


def test_long_messages_wait_one_behind_the_other(peers, peer, left):
    for _ in range(2):
        peers.send(peer, LONG)
    peers.send(peer, small(0))
    assert left == [0]


def test_the_next_message_is_on_its_way_once_the_one_before_has_been_taken(peers, peer, pipe, left):
    peers.send(peer, LONG)
    peers.send(peer, LONG)
    assert peer.num_waiting_bytes > 4 << 20
    pipe.room = 5
    peers.retry()
    assert len(peer.backlog) == 5 and peer.num_waiting_bytes == 0
    peers.send(peer, small(0))
    assert not left and 100_000 < peer.num_waiting_bytes < 101_000
    pipe.room = 100
    peers.retry()
    assert not peer.backlog and peer.num_waiting_bytes == 0 and not left
    peers.send(peer, small(1))
    assert not peer.backlog
