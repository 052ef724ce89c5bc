"""A program of the user's is captured, bounded, and killed with all that it has started, however its owner ends."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rollout_engine.children.program import Program

PATH = {"PATH": os.environ["PATH"]}


def start(*command, environment=PATH, directory="/", max_output_bytes=1000):
    return Program(command, environment=environment, directory=directory, max_output_bytes=max_output_bytes)


def run(script, seconds=None, **options):
    return start("sh", "-c", script, **options).wait(seconds)


def pids(text):
    return [int(pid) for pid in text.split()]


def runs(number):
    """Whether a process runs; one that has ended may have a parent that is stopped, and does not see it."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(numbers):
    deadline = time.monotonic() + 60
    while (left := [number for number in numbers if runs(number)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_status_and_outputs_are_returned():
    end = run("echo out; echo err >&2; exit 3")
    assert (end.status, end.output, end.errors, end.num_bytes) == (3, "out\n", "err\n", 8)
    assert (end.is_late, end.problem) == (False, "")


def test_a_signal_is_a_negative_status():
    assert run("kill -TERM $$").status == -15


def test_a_program_that_does_not_exist_says_so():
    end = start("no-such-program").wait()
    assert (end.status, end.problem) == (None, "No such file or directory")


def test_the_last_bytes_of_a_long_output_are_kept():
    end = run("yes | head -c 3000000; echo; echo last", max_output_bytes=50)
    assert len(end.output) == 50 and end.output.endswith("\nlast\n") and end.num_bytes == 3_000_006


def test_output_that_is_no_text_is_replaced():
    assert run(r"printf '\377'").output == "\ufffd"


def test_it_has_the_given_variables_alone_and_an_empty_input(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hidden")
    end = run("cat; env", environment={**PATH, "OWN": "1"})
    names = {line.partition("=")[0] for line in end.output.splitlines()}
    assert {"PATH", "OWN"} <= names <= {"PATH", "OWN", "PWD", "OLDPWD", "SHLVL", "_"}


def test_it_inherits_no_descriptor_of_its_owner(tmp_path):
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        listed = run("ls -l /proc/self/fd").output
    assert "secret" not in listed and len([line for line in listed.splitlines() if "->" in line]) <= 4


LEAVING = "(setsid sh -c 'sleep 1000 & echo $! $$; wait' &) ; setsid sleep 1000 & echo $! ; sleep 0.2;"
"""Starts processes that leave the group and the session, and prints their ids."""


@pytest.mark.parametrize("then, seconds, status", [("exit 0", None, 0), ("sleep 1000", 1.0, -9)])
def test_processes_that_left_its_session_end_with_it(then, seconds, status):
    end = run(LEAVING + then, seconds)
    assert (end.status, end.is_late) == (status, status != 0)
    started = pids(end.output)
    assert len(started) == 3
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_another_thread_may_kill_it():
    program = start("sleep", "1000")
    threading.Timer(0.1, program.kill).start()
    end = program.wait()
    assert (end.status, end.is_late) == (-9, False)


def test_a_program_that_is_killed_before_it_is_awaited_has_ended():
    program = start("sleep", "1000")
    assert program.kill() and not program.kill()
    assert program.wait().status == -9


OWNER = """
import os, sys, threading, time
from rollout_engine.children.program import Program

program = Program(["sh", "-c", sys.argv[1]], environment=dict(os.environ), directory="/", max_output_bytes=1000)
threading.Thread(target=program.wait, daemon=True).start()
while not program._group:
    time.sleep(0.01)
print(program._supervisor.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.parametrize("stopped", [False, True])
def test_all_end_with_the_owner_however_it_ends(end, stopped, tmp_path):
    listed = tmp_path / "pids"
    own = "sleep 1000" if stopped else LEAVING + "sleep 1000"  # a stopped supervisor kills none that left the session
    script = f"exec > {listed}; echo $$; {own}"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        supervisor = psutil.Process(int(owner.stdout.readline()))
        while len(pids(listed.read_text() if listed.exists() else "")) < (1 if stopped else 4):
            assert owner.poll() is None
        if stopped:
            supervisor.suspend()
        owner.kill() if end == "kill" else owner.stdin.close()
    try:
        assert_gone(pids(listed.read_text()))
    finally:
        if supervisor.is_running():
            supervisor.kill()


def test_a_supervisor_that_is_killed_takes_the_program_along(tmp_path):
    program = start("sh", "-c", f"echo started; touch {tmp_path}/it-runs; exec sleep 1000")
    while not (tmp_path / "it-runs").exists():
        time.sleep(0.01)
    program._supervisor.kill()
    end = program.wait()
    assert end.status is None and end.output == "started\n"
