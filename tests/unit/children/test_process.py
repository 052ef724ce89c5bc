"""Children that end with their parent, also where they are stopped or hold their interpreter."""

import os
import subprocess
import sys

import psutil
import pytest

from rollout_engine.children.process import start_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")

CHILD = """
import ctypes, os, sys
from rollout_engine.children.process import end_with_parent
end_with_parent(int(sys.argv[1]))
os.write(1, b"bound ")
while os.read(0, 1) == b"?":
    os.write(1, b"lives")
if sys.argv[2] == "in C":
    ctypes.PyDLL(None).pause()
"""
PARENT = """
import os, subprocess, sys, threading
from pathlib import Path
from rollout_engine.children.process import start_process

def start():
    global child
    command = [sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:]]
    child = start_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.read(6)

thread = threading.Thread(target=start)
thread.start()
thread.join()
while Path(f"/proc/self/task/{thread.native_id}").exists():
    pass
child.stdin.write(b"?")
child.stdin.flush()
print(child.pid, child.stdout.read(5).decode(), flush=True)
if sys.argv[2] == "in C":
    child.stdin.write(b"!")
    child.stdin.flush()
sys.stdin.read()
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("state", ["in C", "stopped"])
def test_a_child_ends_with_its_parent_and_not_with_the_thread_that_started_it(state):
    command = [sys.executable, "-c", PARENT, CHILD, state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid, answer = parent.stdout.readline().split()
        assert answer == "lives"
        child = psutil.Process(int(pid))
        if state == "stopped":
            child.suspend()
        parent.kill()
    try:
        assert not psutil.wait_procs([child], timeout=60)[1]
    finally:
        if child.is_running():
            child.kill()


def test_a_forked_process_starts_children_too():
    assert start_process(["true"]).wait() == 0
    if (fork := os.fork()) == 0:
        try:
            os._exit(start_process(["true"]).wait())
        finally:
            os._exit(7)
    assert os.waitpid(fork, 0)[1] == 0


def test_a_child_may_use_the_processors_of_the_thread_that_asks_for_it():
    start_process(["true"]).wait()
    before = os.sched_getaffinity(0)
    for processors in ({min(before)}, before):
        os.sched_setaffinity(0, processors)
        command = [sys.executable, "-S", "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
        with start_process(command, stdout=subprocess.PIPE) as child:
            assert child.stdout.read().decode().strip() == str(sorted(processors))


def test_a_command_that_cannot_be_run_raises_where_it_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        start_process([str(tmp_path / "absent")])
