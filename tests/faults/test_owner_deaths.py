"""An owner that is killed while its core starts: the core goes too, and so does its directory."""

import os
import signal
import socket
import threading
import time

import pytest

from rollout_engine import EngineConfig
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.parent_watch import ParentWatch
from tests.faults.deaths import OPTIONS, wait_gone
from tests.faults.slow_start import BEGUN


def start_in_fork(config):
    """Start a core in a forked process that only waits. Returns that one's id, the core's, and the directory."""
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            process = CoreProcess(config, heartbeat_seconds=0.5, max_backlog_bytes=1 << 20)
            os.write(writing, f"{process.pid} {process.directory}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as answer:
        pid, directory = answer.readline().split()
    return owner, int(pid), directory


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("imports", marks=pytest.mark.slow),
        "loading",
        pytest.param("ready", marks=pytest.mark.slow),
    ],
)
def test_a_core_whose_owner_is_killed_while_it_starts_goes_with_its_directory(
    checkpoint, tmp_path, monkeypatch, moment
):
    begun = tmp_path / "begun"
    monkeypatch.setenv(BEGUN, str(begun))
    slow = ["tests.faults.slow_start:Slow"] if moment == "loading" else []
    config = EngineConfig(model=str(checkpoint), logits_processors=slow, **OPTIONS)
    owner, pid, directory = start_in_fork(config)
    try:
        signs = {"imports": directory, "loading": begun, "ready": f"{directory}/core"}
        deadline = time.monotonic() + 60
        while not os.path.exists(signs[moment]):
            assert time.monotonic() < deadline, f"no {signs[moment]}"
            time.sleep(0.01)
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    try:
        wait_gone(pid, directory, 60)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("cause", ["its end of the lifeline is closed", "another process has it", "it is over"])
def test_a_parent_watch_notices_either_sign_until_it_is_over(cause):
    ours, theirs = socket.socketpair()
    dead = threading.Event()
    with ours, theirs:
        theirs.sendall(b"settings that nobody has read yet")
        watch = ParentWatch(ours, -1 if cause == "another process has it" else os.getppid(), dead.set)
        if cause == "it is over":
            watch.end()
        if cause != "another process has it":
            theirs.close()
        assert dead.wait(1 if cause == "it is over" else 60) == (cause != "it is over")
