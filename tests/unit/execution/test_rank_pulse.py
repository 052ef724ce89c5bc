"""Signs of life of ranks: which silence counts as death."""

import socket
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rollout_engine.children.channel import Channel
from rollout_engine.execution import rank_pulse
from rollout_engine.execution.rank_pulse import HANG_SECONDS, PulseWatch


@pytest.fixture
def watch(monkeypatch):
    """Makes a watch of one rank that looks only when asked, the rank's end of the socket, and the reasons given."""
    monkeypatch.setattr(rank_pulse, "start_thread", lambda *_, **__: None)

    @contextmanager
    def make(is_remote=False):
        ours, theirs = socket.socketpair()
        channel, reasons = Channel(ours), []
        rank = SimpleNamespace(name="rank 1", pulse=channel)
        watch = PulseWatch([rank], lambda _, reason: reasons.append(reason), is_remote=is_remote)
        watch.start = watch._looked
        with theirs:
            yield watch, theirs, reasons
        channel.close()

    return make


def look_until(watch, seconds, since=0.0):
    """Look twice a second from `since` to `seconds` after the start."""
    for half in range(int(2 * since), int(2 * seconds) + 1):
        watch._look(watch.start + half / 2)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_rank_that_has_beaten_is_dead_after_five_seconds_of_silence_once(watch, is_remote):
    with watch(is_remote) as (pulses, rank, reasons):
        rank.send(b"\0\0")
        look_until(pulses, HANG_SECONDS)
        assert not reasons
        look_until(pulses, 60, since=HANG_SECONDS)
    (reason,) = reasons
    assert "no sign of life for 4.5 s: its process is stopped" in reason and ("network" in reason) == is_remote


def test_a_rank_may_take_long_to_its_first_sign_but_not_indefinitely(watch):
    with watch() as (pulses, _, reasons):
        look_until(pulses, 299)
        assert not reasons
        look_until(pulses, 301, since=299)
        assert len(reasons) == 1


def test_silence_means_nothing_while_the_watch_itself_stood_still(watch):
    with watch() as (pulses, rank, reasons):
        rank.send(b"\0")
        pulses._look(pulses.start)
        pulses._look(pulses.start + 100)
        pulses._look(pulses.start + 100 + HANG_SECONDS)
        assert not reasons


def test_the_end_of_a_rank_is_no_silence(watch):
    with watch() as (pulses, rank, reasons):
        rank.send(b"\0")
        rank.shutdown(socket.SHUT_RDWR)
        look_until(pulses, 20)
        assert not reasons


def test_signs_of_life_come_from_the_interpreter_where_no_native_thread_starts(monkeypatch, caplog):
    monkeypatch.setattr(rank_pulse, "start_heartbeat", lambda *_: False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank_pulse.start_pulse(Channel(ours))
        theirs.settimeout(60)
        assert theirs.recv(1) == b"\0" and "the heartbeat runs in the interpreter" in caplog.text
