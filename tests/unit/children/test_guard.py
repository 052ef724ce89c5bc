"""Process groups and directories go with the process that guards them, however it ends."""

import subprocess
import sys
import time

import psutil
import pytest

from rollout_engine.children.guard import Guard
from tests.forking import in_fork


def started():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)


OWNER = """
import os, subprocess, sys, time
from rollout_engine.children.guard import Guard

guard = Guard()
groups = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(3)]
for group in groups:
    guard.add_group(group.pid)
groups[0].kill()
groups[0].wait()
guard.drop_group(groups[0].pid)
if os.fork() == 0:  # it holds what it inherits
    time.sleep(1000)
print(*(group.pid for group in groups[1:]), flush=True)
sys.stdin.read()
"""


@pytest.mark.quick(1)
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
    guard, process = Guard(), started()
    before = set(psutil.Process().children())
    try:
        guard.add_group(process.pid)
        assert len(set(psutil.Process().children()) - before) == 1
        in_fork(lambda: guard.drop_group(process.pid))
        guard.drop_group(process.pid)
        assert set(psutil.Process().children()) == before and process.poll() is None
    finally:
        process.kill()
        process.wait()


PATHS = """
import sys
from pathlib import Path
from rollout_engine.children.guard import Guard

guard, folder = Guard(), Path(sys.argv[1])
for name in ("it's $HOME", "dropped", "one-a", "one-b", "other"):
    (folder / name).mkdir()
    (folder / name / "file").touch()
guard.add_path(str(folder / "it's $HOME"), str(folder / "one-"))
guard.add_path(str(folder / "dropped"))
guard.drop_path(str(folder / "dropped"))
print("guarded", flush=True)
sys.stdin.read()
"""


def test_paths_are_removed_when_their_owner_is_killed_and_no_others(tmp_path):
    command = [sys.executable, "-c", PATHS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline()
        assert len(list(tmp_path.iterdir())) == 5
        owner.kill()
    deadline = time.monotonic() + 60
    while (left := {path.name for path in tmp_path.iterdir()}) != {"dropped", "other"}:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
