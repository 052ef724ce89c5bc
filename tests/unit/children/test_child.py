"""A child process is spoken to, watched and ended by its handle, and goes with its owner."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from rollout_engine.children.child import Child
from rollout_engine.children.process import start_module
from tests.forking import in_fork

MODULE = "tests.unit.children.obedient"


@pytest.fixture
def child():
    made = Child(lambda ends: start_module(MODULE, descriptors=ends))
    yield made
    made.end(kill=True)


def gone(process):
    return not psutil.wait_procs([process], timeout=60)[1]


def test_a_child_answers_and_ends_when_its_channel_is_closed(child):
    assert child.ask("hello", str) == "hello" and child.is_alive
    assert child.end() == 0 and not child.is_alive
    assert child.end() == 0


def test_what_a_child_has_started_ends_with_it(child):
    started = psutil.Process(int(child.ask("start", str)))
    assert child.end() == 0
    assert gone(started)


@pytest.mark.parametrize("word, status", [("exit", 3), ("fork", 4)])
def test_a_child_that_ends_instead_of_answering_is_noticed_although_others_hold_its_channel(child, word, status):
    with pytest.raises(EOFError):
        child.ask(word, str)
    assert child.wait(60) == status


def test_a_child_that_is_stopped_is_too_late_and_is_killed_at_its_end(child):
    child.ask("hello", str)
    child.signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        child.ask("hello", str, 0.2)
    assert child.end(kill=True) == -signal.SIGKILL


def test_a_forked_process_leaves_its_parents_child_alone(child):
    child.ask("hello", str)

    def check():
        with pytest.raises(OSError):
            child.ask("hello", str)
        assert child.end(kill=True) is None

    in_fork(check)
    assert child.ask("again", str) == "again"


def test_a_child_that_cannot_start_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))

    def refuse(ends):
        raise BlockingIOError("no more processes")

    with pytest.raises(BlockingIOError):
        Child(refuse, num_channels=3)
    assert len(os.listdir("/proc/self/fd")) == before


OWNER = """
import sys
from rollout_engine.children.child import Child
from rollout_engine.children.process import start_module

child = Child(lambda ends: start_module("tests.unit.children.obedient", descriptors=ends))
print(child.pid, child.ask("start", str), child.ask(sys.argv[1], str), flush=True)
sys.stdin.read()
"""


@pytest.mark.quick(1)
@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
@pytest.mark.parametrize("word", ["stop", "hold"])
def test_a_child_that_is_stopped_or_held_in_native_code_goes_with_its_owner_and_all_that_it_has_started(word):
    command = [sys.executable, "-c", OWNER, word]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        left = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()[:2]]
        if word == "stop":
            left[0].suspend()
        owner.kill()
    try:
        assert not psutil.wait_procs(left, timeout=60)[1]
    finally:
        for process in left:
            if process.is_running():
                process.kill()
