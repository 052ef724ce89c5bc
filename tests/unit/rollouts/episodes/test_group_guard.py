"""Process groups end with the process that guards them, however it ends."""

import subprocess
import sys

import psutil
import pytest

from rollout_engine.rollouts.episodes.group_guard import GroupGuard
from tests.forking import in_fork


def started():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)


OWNER = """
import os, subprocess, sys, time
from rollout_engine.rollouts.episodes.group_guard import GroupGuard

guard = GroupGuard()
groups = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(3)]
for group in groups:
    guard.add(group.pid)
groups[0].kill()
groups[0].wait()
guard.remove(groups[0].pid)
if os.fork() == 0:  # it holds what it inherits
    time.sleep(1000)
print(*(group.pid for group in groups[1:]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_groups_end_with_their_owner(end):
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        left = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        held = [child for child in psutil.Process(owner.pid).children() if child.name().startswith("python")]
        assert len(left) == 2 and len(held) == 1
        owner.kill() if end == "kill" else owner.stdin.close()
    try:
        assert not psutil.wait_procs(left, timeout=60)[1]
    finally:
        for process in [*left, *held]:
            if process.is_running():
                process.kill()


def test_the_shell_ends_with_the_last_group_and_a_forked_child_leaves_it_alone():
    guard, process = GroupGuard(), started()
    before = set(psutil.Process().children())
    try:
        guard.add(process.pid)
        assert len(set(psutil.Process().children()) - before) == 1
        in_fork(lambda: guard.remove(process.pid))
        guard.remove(process.pid)
        assert set(psutil.Process().children()) == before and process.poll() is None
    finally:
        process.kill()
        process.wait()
