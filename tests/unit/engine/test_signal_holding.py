"""Signals held back around changes of an engine's state: when they are handled, and what is left afterwards."""

import contextlib
import os
import signal
import sys
import threading

import pytest

from rollout_engine.engine import interrupts
from rollout_engine.engine.engine_lock import EngineLock
from rollout_engine.engine.interrupts import allowed, deliver, held


@pytest.fixture(autouse=True)
def handlers():
    """Those of signals are the same afterwards."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def press():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_raised_at_the_end_of_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with held():
            with held():
                press()
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]


def test_an_interrupt_is_raised_where_it_is_delivered():
    done = []
    with pytest.raises(KeyboardInterrupt), held():
        deliver()
        press()
        done.append(1)
        deliver()
        done.append(2)
    assert done == [1]


def test_what_waits_is_raised_where_a_users_code_begins_and_what_comes_there_at_once():
    with pytest.raises(KeyboardInterrupt), held():
        press()
        with allowed():
            pytest.fail("it waited")
    done = []
    with pytest.raises(KeyboardInterrupt), held():
        with allowed():
            done.append(1)
            press()
            done.append(2)
    assert done == [1]


def test_after_a_users_code_signals_are_held_again():
    done = []
    with pytest.raises(KeyboardInterrupt), held(), held():
        with allowed():
            pass
        press()
        done.append(1)
    assert done == [1]


def test_a_block_inside_a_users_code_holds_too():
    done = []
    with pytest.raises(KeyboardInterrupt), held():
        with allowed():
            with held():
                press()
                done.append(1)
            done.append(2)
    assert done == [1]


def test_a_users_code_has_its_own_handlers():
    with held(), allowed():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_called_once_and_late(monkeypatch):
    calls = []
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 1e9)
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        with held():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert calls == []
        assert calls == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held():
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_comes_again_is_raised_at_once_and_tears_the_block(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.0)
    torn, done = [], []
    lock = EngineLock(lambda: torn.append(True))
    with pytest.raises(KeyboardInterrupt), lock:
        press()
        done.append(1)
        press()
        done.append(2)
    assert (done, torn) == ([1], [True])
    with lock:
        pass
    assert torn == [True]


def test_other_threads_hold_nothing_and_end_nothing():
    def run():
        with held(), allowed(), EngineLock():
            deliver()

    done = []
    with pytest.raises(KeyboardInterrupt), held():
        press()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        done.append(1)
    assert done == [1]


def test_a_condition_waits_on_the_lock_and_gives_it_back():
    lock = EngineLock()
    condition, order = threading.Condition(lock), []

    def run():
        with lock, condition:
            order.append("notifies")
            condition.notify_all()

    with lock, condition:
        thread = threading.Thread(target=run)
        thread.start()
        assert condition.wait_for(lambda: order, timeout=300)
        order.append("woken")
    thread.join()
    assert order == ["notifies", "woken"]


def interrupted_at(line, call):
    """Run `call` with Ctrl-C before the line number `line` that is run inside `interrupts` or `engine_lock`."""
    files, left = {interrupts.__file__, sys.modules[EngineLock.__module__].__file__}, [line]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "_on_signal":
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                press()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return left[0] > 0


def test_an_interrupt_at_any_line_of_the_holding_itself_leaves_nothing_behind():
    lock = EngineLock(pytest.fail)

    def call():
        with contextlib.suppress(KeyboardInterrupt):
            with held():
                with lock:
                    pass
                with allowed():
                    with lock:
                        pass
                deliver()

    line, beyond = 0, False
    while not beyond:
        line += 1
        beyond = interrupted_at(line, call)
        assert not lock._lock._is_owned(), f"line {line}: the lock is still taken"
        with contextlib.suppress(KeyboardInterrupt), held():  # the next block is right again
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"line {line}: a handler was left"
        done = []
        with contextlib.suppress(KeyboardInterrupt), held():
            press()
            done.append(1)
        assert done == [1], f"line {line}: the next interrupt was not held"
    assert line > 100
