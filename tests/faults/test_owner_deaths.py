"""An owner that is killed while its core starts: the core goes too, and so does its directory."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rollout_engine import EngineConfig
from rollout_engine.kernels.cpu import turns
from rollout_engine.process import core_launcher
from rollout_engine.process.core_launcher import CoreProcess
from sync.locked_directories import sweep_stale_directories
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("imports", marks=pytest.mark.slow),
        pytest.param("loading", marks=pytest.mark.slow),
        "ready",
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


RANKED = """
import asyncio, sys
from rollout_engine import AsyncLLM

options = dict(num_kv_blocks=256, num_threads=1, skip_tokenizer_init=True)
if sys.argv[2] == "held":
    options |= dict(worker_extensions=["tests.faults.stuck_code:StuckExtension"], step_deadline=600)
else:
    options |= dict(tensor_parallel_size=2)
engine = AsyncLLM(sys.argv[1], **options)
print(engine.frontend.client.pid, engine.address, flush=True)
if sys.argv[2] == "held":
    asyncio.run(engine.collective_rpc("hold_interpreter", args=(600,)))
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
def test_a_core_and_a_rank_that_are_stopped_go_with_their_owner(checkpoint):
    command = [sys.executable, "-c", RANKED, str(checkpoint), "stopped"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        pid, directory = owner.stdout.readline().split()
        core = psutil.Process(int(pid))
        (rank,) = [child for child in core.children() if child.name() != "sh"]
        for process in (rank, core):
            process.suspend()
        owner.kill()
    try:
        wait_gone(core.pid, directory, 60)
        wait_gone(rank.pid, directory, 60)
    finally:
        for process in psutil.wait_procs([core, rank], 0)[1]:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the owner's end", "after it"])
def test_a_core_held_in_native_code_goes_with_its_owner_and_its_files(checkpoint, moment):
    command = [sys.executable, "-c", RANKED, str(checkpoint), "held"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        pid, directory = owner.stdout.readline().split()
        core = psutil.Process(int(pid))
        shared = Path(f"/dev/shm/{Path(directory).name}-weights-0-left")
        shared.mkdir()
        time.sleep(0.5)  # the call is on its way; a core that does not run it yet ends no later
        if moment == "before the owner's end":
            core.suspend()
        owner.kill()
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        core.suspend()
    try:
        wait_gone(core.pid, directory, 60)
        wait_gone(core.pid, str(shared), 60)
    finally:
        if core.is_running():
            core.kill()


@pytest.fixture
def directories(tmp_path, monkeypatch):
    """Directories of cores are made in `tmp_path`. No socket is: the path may be too long for one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(core_launcher, "_MAX_ADDRESS_BYTES", 1000)


def test_the_directory_of_an_owner_that_is_killed_before_its_core_starts_is_swept(
    checkpoint, tmp_path, directories, monkeypatch
):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    owner = os.fork()
    if owner == 0:
        try:
            CoreProcess(
                EngineConfig(model=str(checkpoint), **OPTIONS), heartbeat_seconds=0.5, max_backlog_bytes=1 << 20
            )
        finally:
            os._exit(1)
    assert os.waitpid(owner, 0)[1] == signal.SIGKILL
    (directory,) = tmp_path.glob("rollout-engine-*")
    os.utime(directory, (time.time() - 61,) * 2)
    sweep_stale_directories(str(tmp_path))
    assert not directory.exists()


def test_a_core_that_starts_keeps_its_directory(checkpoint, tmp_path, directories):
    config = EngineConfig(model=str(checkpoint), **OPTIONS)
    process = CoreProcess(config, heartbeat_seconds=0.5, max_backlog_bytes=1 << 20)
    try:
        os.utime(process.directory, (time.time() - 3600,) * 2)
        sweep_stale_directories(str(tmp_path))
        assert os.listdir(process.directory)
    finally:
        process.end(kill=True)
    assert not list(tmp_path.glob("rollout-engine-*"))


def test_a_core_that_cannot_start_leaves_no_directory(checkpoint, tmp_path, directories, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(BlockingIOError):
        CoreProcess(EngineConfig(model=str(checkpoint), **OPTIONS), heartbeat_seconds=0.5, max_backlog_bytes=1 << 20)
    assert not list(tmp_path.glob("rollout-engine-*"))
