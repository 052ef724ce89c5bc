"""Work in the background is done, whatever its priority."""

import os
import sys
import threading

import pytest

from rollout_engine.process.background import run_in_background


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a priority of its own")
def test_work_is_done_where_priorities_may_not_be_changed(monkeypatch):
    def forbidden(*_):
        asked.set()
        raise PermissionError

    asked, done = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "setpriority", forbidden)
    run_in_background(done.set, name="work")
    assert done.wait(60) and asked.is_set()
