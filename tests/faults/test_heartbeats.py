"""Heartbeats: a core that is busy in C is alive, one that is stopped is not, and neither outlives its parent."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from rollout_engine import AsyncLLM, EngineDeadError
from rollout_engine.kernels.cpu import build
from rollout_engine.process.pulse import PulseReader
from tests.faults.deaths import OPTIONS, wait_gone

BEATING = """
import ctypes, socket, sys
from rollout_engine.process.pulse import Pulse

pulse = Pulse(sys.argv[2], socket.socket(fileno=int(sys.argv[1])))
pulse.turn()
print("counts", flush=True)
ctypes.PyDLL(None).sleep(600)  # it holds the interpreter
"""
EXTENSIONS = dict(worker_extensions=["tests.faults.stuck_code:StuckExtension"])
needs_kernels = pytest.mark.skipif(build.load_kernels() is None, reason="the C++ kernels cannot be built here")


def read_until(reader, is_enough):
    """Look until `is_enough()`; returns whether that came within a minute."""
    deadline = time.monotonic() + 60
    while not is_enough() and time.monotonic() < deadline:
        reader.look(time.monotonic(), heard=False)
        time.sleep(0.01)
    return is_enough()


@pytest.mark.slow
@needs_kernels
def test_a_process_beats_while_its_interpreter_is_held_until_it_is_stopped_and_ends_without_its_parent(tmp_path):
    directory = tmp_path / "engine"
    (directory / "inside").mkdir(parents=True)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-c", BEATING, str(theirs.fileno()), str(directory)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()])
        with process, process.stdout:
            try:
                assert process.stdout.readline() == b"counts\n"
                reader = PulseReader(str(directory), 0.0)
                reader.look(1.0, heard=False)
                assert reader.interpreter_at == 1.0
                assert read_until(reader, lambda: reader.alive_at > 1.0), "it beats"
                assert reader.interpreter_at == 1.0, "and makes no turn"
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                reader.look(time.monotonic(), heard=False)
                last = reader.alive_at
                time.sleep(0.5)
                reader.look(time.monotonic(), heard=False)
                assert reader.alive_at == last, "a stopped process does not beat"
                process.send_signal(signal.SIGCONT)
                ours.close()
                assert process.wait(60) == 1
                assert not directory.exists()
            finally:
                process.kill()
                reader.close()


@pytest.mark.slow
@needs_kernels
def test_a_call_into_c_that_holds_the_interpreter_looks_like_no_death_before_the_deadline(checkpoint, post_mortems):
    async def run(engine):
        client = engine.frontend.client._socket
        await engine.collective_rpc("hold_interpreter", args=[0])
        client._hang_seconds = 3.0
        await engine.collective_rpc("hold_interpreter", args=[5])
        assert not engine.errored
        client._hang_seconds = 600.0
        held = asyncio.create_task(engine.collective_rpc("hold_interpreter", args=[600]))
        client._step_deadline = 2.0
        with pytest.raises(EngineDeadError, match="its process lives, but its interpreter has been held for"):
            await held

    with AsyncLLM(checkpoint, **OPTIONS, **EXTENSIONS) as engine:
        pid = engine.frontend.client.pid
        asyncio.run(run(engine))
        (path,) = post_mortems.iterdir()
        assert f"(its stacks are in {path})" in str(engine.dead_error)
        assert "in hold_interpreter" in path.read_text()
    wait_gone(pid, engine.address, 60)


def test_signs_of_life_are_told_apart(tmp_path, caplog):
    file = tmp_path / "pulse"
    file.write_bytes(bytes(24))
    reader = PulseReader(str(tmp_path), 0.0)
    reader.look(1.0, heard=False)
    file.write_bytes(b"\1" + bytes(23))
    reader.look(2.0, heard=False)
    assert (reader.alive_at, reader.interpreter_at) == (2.0, 1.0)
    assert reader.silence(5.0, 5.0, 100.0) is None
    file.write_bytes(b"\2" + bytes(23))
    reader.look(7.0, heard=False)
    assert [reader.silence(7.0, 5.0, 100.0) for _ in range(3)] == [None] * 3
    assert caplog.text.count("its interpreter has been held for 6.0 s") == 1
    assert "interpreter has been held for 6.0 s, by a call into C that does not return" in reader.silence(7.0, 5.0, 5.5)
    assert "no sign of life for 5 s" in reader.silence(12.1, 5.0, 100.0)
    reader.look(13.0, heard=True)
    assert reader.silence(13.0, 5.0, 5.0) is None
    file.write_bytes(b"\2" + bytes(7) + b"\1" + bytes(15))
    reader.look(14.0, heard=False)
    assert (reader.alive_at, reader.interpreter_at) == (14.0, 14.0)
    reader.close()


def test_a_core_without_counts_lives_by_its_messages(tmp_path):
    reader = PulseReader(str(tmp_path), 0.0)
    reader.look(3.0, heard=True)
    reader.look(4.0, heard=False)
    assert reader.alive_at == reader.interpreter_at == 3.0
    reader.close()
