"""The native heartbeat, in a process of its own, which it may end."""

import subprocess
import sys

import pytest

from rollout_engine.kernels.cpu import build

PROGRAM = """
import ctypes, socket, sys
from rollout_engine.kernels.cpu.heartbeat import start_heartbeat
libc = ctypes.CDLL(None)
libc.calloc.restype = ctypes.c_void_p
place = libc.calloc(1, 8)  # the thread beats on while the interpreter frees what it has
beats, (ours, theirs) = ctypes.c_uint64.from_address(place), socket.socketpair()
assert start_heartbeat(place, ours.fileno(), sys.argv[1], float(sys.argv[2]))
while beats.value < 3:
    pass
if sys.argv[3] == "orphan":
    theirs.close()
    libc.pause()
"""


@pytest.mark.slow
@pytest.mark.skipif(build.load_kernels() is None, reason="the C++ kernels cannot be built here")
@pytest.mark.parametrize("fate, orphan_seconds, status", [("leave", 3600, 0), ("orphan", 0.1, 1)])
def test_it_beats_and_ends_an_orphan_with_its_directory(tmp_path, fate, orphan_seconds, status):
    directory = tmp_path / "core"
    (directory / "inside").mkdir(parents=True)
    (directory / "inside" / "file").touch()
    command = [sys.executable, "-c", PROGRAM, str(directory), str(orphan_seconds), fate]
    assert subprocess.run(command, capture_output=True, text=True, timeout=300).returncode == status
    assert directory.exists() == (fate == "leave")
