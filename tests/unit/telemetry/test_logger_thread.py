"""A stat logger on a thread of its own: called in order, and a slow one misses no seconds."""

import threading

import pytest

from rollout_engine.telemetry.logger_thread import MAX_WAITING, LoggerThread


class Recorder:
    def __init__(self):
        self.calls, self.gate = [], threading.Event()
        self.gate.set()

    def attach(self, read):
        self.read = read

    def log(self, metrics, seconds):
        self.gate.wait()
        self.calls.append((metrics, seconds))

    def close(self):
        self.calls.append("closed")


def test_calls_come_in_order_and_close_comes_last():
    recorder = Recorder()
    thread = LoggerThread(recorder, dict)
    for i in range(3):
        thread.log(i, 1.0)
    thread.flush()
    assert recorder.calls == [(0, 1.0), (1, 1.0), (2, 1.0)]
    thread.close()
    thread.close()
    assert recorder.calls[3:] == ["closed"] and recorder.read is dict


def test_what_a_slow_logger_misses_is_merged_into_its_newest_call():
    recorder = Recorder()
    recorder.gate.clear()
    thread = LoggerThread(recorder, dict)
    for i in range(100):
        thread.log(i, 1.0)
    recorder.gate.set()
    thread.close()
    *calls, closed = recorder.calls
    assert closed == "closed" and len(calls) <= MAX_WAITING + 1
    assert calls[-1][0] == 99 and sum(seconds for _, seconds in calls) == 100.0


@pytest.mark.parametrize("problem", [ValueError("no"), SystemExit(1)])
def test_whatever_a_logger_raises_is_logged_once_and_the_next_call_comes(problem, caplog):
    recorder = Recorder()
    calls = []

    def log(metrics, seconds):
        calls.append(metrics)
        raise problem

    recorder.log = log
    thread = LoggerThread(recorder, dict)
    thread.log(1, 1.0)
    thread.log(2, 1.0)
    thread.close()
    assert calls == [1, 2] and recorder.calls == ["closed"]
    assert len(caplog.records) == 1 and f"Recorder raised {type(problem).__name__}" in caplog.text


def test_a_logger_that_cannot_be_attached_is_named_and_left_alone(caplog):
    recorder = Recorder()
    recorder.attach = {}.__getitem__
    thread = LoggerThread(recorder, dict)
    thread.log(1, 1.0)
    thread.flush()
    thread.close()
    assert recorder.calls == [] and "Recorder raised KeyError" in caplog.text
