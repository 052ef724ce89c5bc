"""The door at which ranks of other machines connect: strangers keep none of them waiting."""

import socket
import time
from contextlib import ExitStack, suppress

import pytest

from rollout_engine.execution import remote_ranks
from rollout_engine.execution.remote_ranks import _HELLO, Door

WHOLE = b"x" * _HELLO.size


@pytest.fixture
def door():
    """A door, and a function that connects to it and sends something."""
    made = Door(socket.create_server(("127.0.0.1", 0)))
    with ExitStack() as stack:
        stack.callback(made.close)

        def connect(content):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", made.port)))
            end.sendall(content)
            return end

        yield made, connect


def take(door, seconds=60.0):
    """The hellos of the next connections that have said all of theirs; [] after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := list(door.arrivals(0.05)):
            for end, _ in found:
                end.close()
            return [hello for _, hello in found]
    return []


def test_a_slow_stranger_keeps_no_rank_waiting(door, monkeypatch):
    monkeypatch.setattr(remote_ranks, "_HELLO_SECONDS", 3600.0)
    made, connect = door
    slow = [connect(content) for content in (b"", b"y", b"y" * (_HELLO.size - 1))]
    connect(WHOLE)
    assert take(made) == [WHOLE]
    slow[-1].sendall(b"z")
    assert take(made) == [b"y" * (_HELLO.size - 1) + b"z"], "and it is read as it comes"


def test_a_stranger_that_says_too_little_is_closed_after_a_while(door, monkeypatch):
    monkeypatch.setattr(remote_ranks, "_HELLO_SECONDS", 0.0)
    made, connect = door
    stranger = connect(b"GET")
    assert take(made, 0.5) == []
    stranger.settimeout(60)
    with suppress(ConnectionResetError):  # bytes of it were left unread
        assert stranger.recv(1) == b""
    assert not made._waiting


def test_a_stranger_that_leaves_is_forgotten(door):
    made, connect = door
    connect(b"GET").close()
    connect(WHOLE)
    assert take(made) == [WHOLE]
    assert take(made, 0.2) == [] and not made._waiting


def test_of_too_many_strangers_the_oldest_is_closed(door, monkeypatch):
    monkeypatch.setattr(remote_ranks, "_HELLO_SECONDS", 3600.0)
    monkeypatch.setattr(remote_ranks, "_MAX_WAITING", 2)
    made, connect = door
    strangers = [connect(b"") for _ in range(5)]
    connect(WHOLE)
    assert take(made) == [WHOLE]
    assert len(made._waiting) <= 2
    strangers[0].settimeout(60)
    assert strangers[0].recv(1) == b""
