"""What a rank says before it ends."""

import socket

import pytest

from rollout_engine.children.channel import Channel
from rollout_engine.children.failure import Failure
from rollout_engine.execution import rank_main
from rollout_engine.execution.rank_wire import Meet
from rollout_engine.kernels.cpu.turns import BrokenTurnsError


class Left(BaseException):
    """In place of the end of the process."""


def test_a_rank_that_is_left_in_a_step_says_why(monkeypatch):
    def leave(status):
        raise Left(status)

    class Worker:
        def take_part(self, message):
            raise BrokenTurnsError("the ranks are not connected: Connection reset by peer")

    monkeypatch.setattr(rank_main, "_leave", leave)
    (life, own_life), (steps, own_steps) = (tuple(map(Channel, socket.socketpair())) for _ in range(2))
    steps.send(Meet())
    with pytest.raises(Left, match="1"):
        rank_main._take_part(Worker(), None, own_life, own_steps)
    death = life.receive(Failure)
    assert death.text == "BrokenTurnsError: the ranks are not connected: Connection reset by peer"
    for channel in (life, own_life, steps, own_steps):
        channel.socket.close()
