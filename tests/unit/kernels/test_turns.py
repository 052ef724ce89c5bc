"""Barriers in shared memory: nobody passes before all have come, and nobody waits for one that will not."""

import mmap
import subprocess
import sys
import threading
import time

import pytest
import torch

from rollout_engine.kernels.cpu import turns
from rollout_engine.kernels.cpu.turns import BrokenTurnsError, Turns

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="the C++ kernels cannot be built here")

_CHILD = """
import mmap, sys, torch
from rollout_engine.kernels.cpu.turns import Turns
memory = torch.frombuffer(mmap.mmap(int(sys.argv[1]), 8192), dtype=torch.uint8)
own, counts = Turns(memory, 2), memory[4096:].view(torch.int64)
for turn in range(200):
    own.meet()
    assert int(counts[0]) == turn + 1, (turn, int(counts[0]))
    counts[1] = turn + 1
    own.meet()
"""


@pytest.fixture
def memory():
    return torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)


def test_two_processes_see_what_the_other_wrote_before_it_met_them(tmp_path):
    with open(tmp_path / "memory", "w+b") as file:
        file.truncate(8192)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 8192), dtype=torch.uint8)
        own, counts = Turns(memory, 2), memory[4096:].view(torch.int64)
        command = [sys.executable, "-c", _CHILD, str(file.fileno())]
        with subprocess.Popen(command, pass_fds=[file.fileno()]) as child:
            for turn in range(200):
                counts[0] = turn + 1
                own.meet()
                own.meet()
                assert int(counts[1]) == turn + 1
        assert child.returncode == 0


def test_nobody_passes_before_the_last_has_come(memory):
    passed = []
    threads = [threading.Thread(target=lambda: (Turns(memory, 3).meet(), passed.append(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not passed
    Turns(memory, 3).meet()
    for thread in threads:
        thread.join(10)
    assert len(passed) == 2


def test_breaking_ends_the_wait_of_all_and_of_those_who_come_later(memory):
    own, failures = Turns(memory, 2), []

    def meet():
        try:
            own.meet()
        except BrokenTurnsError as error:
            failures.append(error)

    thread = threading.Thread(target=meet)
    thread.start()
    time.sleep(0.05)
    assert not own.are_broken
    Turns(memory, 2).break_()
    thread.join(10)
    assert failures
    with pytest.raises(BrokenTurnsError):
        own.meet()


def test_memory_that_is_not_aligned_is_refused(memory):
    with pytest.raises(ValueError, match="aligned to 64 bytes"):
        Turns(memory[8:], 2)
