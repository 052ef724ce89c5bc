"""An update whose verbs come as calls: how it ends, whoever ends it, and what the core is told."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError, RetryableError
from rollout_engine.base.metrics import CoreStats
from rollout_engine.weights.update_session import UpdateSession
from sync.base import WeightReceiver
from sync.errors import SyncError, TransferTimeout
from tests.integration.sample_extensions import refuse_thread


class Core:
    """What a core is told, in order; `inside` is whether the boundary is held."""

    def __init__(self):
        self.stats, self.trace, self.inside = CoreStats(), [], False

    @contextmanager
    def boundary(self):
        self.inside = True
        yield
        self.inside = False

    def begin_update(self, verb):
        assert self.inside
        self.trace.append("begin")

    def commit_version(self, version, kv):
        assert self.inside
        self.trace.append((version, kv))

    def end_update(self, *, dirty):
        assert self.inside
        self.trace.append(("end", dirty))


class Endless(WeightReceiver):
    """Waits for its sender until it is closed; then a tensor comes all the same."""

    def __init__(self, sender):
        self.sender, self.waiting, self.closed = sender, threading.Event(), threading.Event()

    def receive(self, manifest):
        self.waiting.set()
        assert self.closed.wait(60)
        yield "q", self.sender.read("q")

    def close(self):
        self.closed.set()


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def session(engine, core):
    session = UpdateSession(engine.updater)
    session.attach_core(core, core.boundary)
    yield session
    session.close()


@pytest.fixture
def offered(engine, weights, offer):
    return offer(engine, weights())


def begin(session, manifest, caller=None, **options):
    with session.called_by(caller):
        return session.begin(manifest, reset_version=False, **options)


def stage(session, manifest, sender):
    session.stage((spec.name, sender.read(spec.name)) for spec in manifest.tensors)


def failures(core):
    return core.stats.updates.failures


def test_the_core_is_told_of_begin_commit_and_end_at_a_boundary(engine, session, core, offered):
    manifest, sender = offered
    assert begin(session, manifest)
    stage(session, manifest, sender)
    assert session.verify() == session.commit(1, "recompute") == manifest.digest
    assert core.trace == ["begin", (1, "recompute"), ("end", False)]
    assert core.stats.updates.num_bytes == manifest.num_bytes and not failures(core)
    assert not begin(session, manifest)  # live already
    assert core.trace[3:] == ["begin", ("end", None)]


def test_a_refused_commit_leaves_the_update_open(engine, session, core, offered):
    manifest, sender = offered
    begin(session, manifest)
    with pytest.raises(LifecycleError, match="not verified"):
        session.commit(1, "keep")
    stage(session, manifest, sender)
    session.verify()
    assert session.commit(1, "keep") == manifest.digest


def test_a_commit_that_fails_half_way_ends_the_update_and_leaves_the_weights_dirty(engine, session, core, offered):
    manifest, sender = offered
    begin(session, manifest)
    stage(session, manifest, sender)
    session.verify()
    engine.packed.at_swap = lambda: engine.live["q"].zero_()
    with pytest.raises(DirtyWeightsError):
        session.commit(1, "keep")
    assert core.trace[-1] == ("end", True) and failures(core) == {"DirtyWeightsError": 1}
    with pytest.raises(LifecycleError, match="verify_weights: no update is open"):
        session.verify()


def test_an_abort_counts_the_error_that_led_to_it(session, core, offered):
    manifest, sender = offered
    for failure in ("ManifestMismatch", "Aborted"):
        begin(session, manifest)
        if failure != "Aborted":
            with pytest.raises(SyncError):
                session.stage([("q", torch.zeros(1))])
        session.abort()
        assert failures(core)[failure] == 1 and core.trace[-1] == ("end", None)
    session.abort()  # nothing is open
    assert len(core.trace) == 4


def test_an_update_that_no_call_has_begun_is_left_alone(engine, session, offered):
    engine.updater.begin(offered[0])
    session.abort()
    assert engine.updater.is_open


@pytest.mark.parametrize("leaves", [True, False])
def test_a_call_that_waits_for_its_sender_is_interrupted(engine, session, core, offered, leaves):
    """Its client leaves, or its time is up; no other call gets in meanwhile."""
    manifest, sender = offered
    before, receiver, errors = engine.state(), Endless(sender), []
    begin(session, manifest, caller=7, timeout=60)

    def receive():
        with session.called_by(7), pytest.raises(TransferTimeout) as raised:
            session.receive(receiver)
        errors.append(str(raised.value))

    thread = threading.Thread(target=receive)
    thread.start()
    assert receiver.waiting.wait(60)
    if leaves:
        with pytest.raises(LifecycleError, match="abort_weight_update: another call is at work"):
            session.abort()
        session.caller_left(7)
    else:
        session._expire(session._open)
    thread.join(60)
    assert len(errors) == 1 and ("has left" if leaves else "not committed within 60 s") in errors[0]
    assert failures(core) == {"ClientLeft" if leaves else "TransferTimeout": 1}
    assert engine.state() == before and not engine.updater.is_open
    with session.called_by(7), pytest.raises(LifecycleError if leaves else TransferTimeout, match="^verify_weights: "):
        session.verify()


def test_only_the_client_that_began_an_update_ends_it_by_leaving_and_begins_no_other(engine, session, offered):
    manifest, _ = offered
    begin(session, manifest, caller=1)
    session.caller_left(2)
    assert engine.updater.is_open
    session.caller_left(1)
    assert not engine.updater.is_open
    with pytest.raises(LifecycleError, match="the client that called it has left"):
        begin(session, manifest, caller=1)


def test_another_client_is_not_told_of_an_update_whose_time_was_up(session, core, offered):
    begin(session, offered[0], caller=1, timeout=0.01)
    while not failures(core):
        time.sleep(0.001)
    with session.called_by(2), pytest.raises(LifecycleError, match="no update is open"):
        session.verify()
    with session.called_by(1), pytest.raises(TransferTimeout, match="begin it again, with a longer timeout"):
        session.verify()


def test_an_update_for_which_no_timer_starts_does_not_begin(session, core, offered, monkeypatch):
    manifest, _ = offered
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(RetryableError, match="cannot start"):
            begin(session, manifest)
    assert core.trace == []
    assert begin(session, manifest)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_a_commit_whose_version_cannot_be_counted_ends_the_update_dirty(engine, session, core, offered, error):
    manifest, sender = offered
    begin(session, manifest)
    stage(session, manifest, sender)
    session.verify()

    def fail(version, kv):
        raise error("injected")

    core.commit_version = fail
    with pytest.raises(error, match="injected"):
        session.commit(1, "keep")
    assert core.trace == ["begin", ("end", True)] and engine.updater.dirty
    assert begin(session, manifest)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_a_begin_that_fails_half_way_leaves_nothing_open(engine, session, core, offered, monkeypatch, error):
    manifest, _ = offered
    opened = engine.updater.begin

    def open_and_fail(*arguments, **options):
        opened(*arguments, **options)
        raise error("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine.updater, "begin", open_and_fail)
        with pytest.raises(error, match="injected"):
            begin(session, manifest)
    assert core.trace == ["begin", ("end", None)] and not engine.updater.is_open
    assert begin(session, manifest)
