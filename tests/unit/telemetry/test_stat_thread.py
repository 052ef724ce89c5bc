"""The thread that shows metrics ends also where the engine does not say how it is."""

import threading
import time

from rollout_engine.base.errors import CallTimeoutError
from rollout_engine.base.metrics import StatLogger
from rollout_engine.telemetry import stat_thread
from rollout_engine.telemetry.stat_thread import StatThread


class Silent(StatLogger):
    def log(self, metrics, seconds):
        raise AssertionError("there is nothing to log")


def test_a_thread_whose_engine_is_busy_is_closed_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(stat_thread, "_READ_SECONDS", 0.01)
    asked = threading.Event()

    def read(timeout=None):
        assert timeout is not None, "it would wait for ever"
        asked.set()
        time.sleep(timeout)
        raise CallTimeoutError("get_core_metrics: no result")

    thread = StatThread([Silent()], read, lambda: True, interval=0.01)
    thread.begin()
    assert asked.wait(60)
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert "was not asked for its last statistics" in caplog.text
