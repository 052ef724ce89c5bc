"""Directories of published weights stay as long as their process, and no longer."""

import os
import signal
import subprocess
import sys
import time

from rollout_engine.fleet.run.store_directory import StoreDirectory
from sync.locked_directories import sweep_stale_directories

PROGRAM = """
from rollout_engine.fleet.run.store_directory import StoreDirectory
import time
directory = StoreDirectory()
(directory.path / "weights").write_bytes(b"0")
print(directory.path, flush=True)
time.sleep(600)
"""


def test_a_directory_in_use_is_not_swept_however_old():
    directory = StoreDirectory()
    (directory.path / "weights").write_bytes(b"0")
    os.utime(directory.path, (0, 0))
    sweep_stale_directories(str(directory.path.parent))
    assert (directory.path / "weights").exists()
    directory.remove()
    assert not directory.path.exists()


def test_a_directory_goes_at_once_when_its_process_is_killed():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        path = program.stdout.readline().strip()
        assert os.path.exists(f"{path}/weights")
        program.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
