"""Wrong tensors are refused, or read right, by every wrapper of C++; tried in a process of its own, which may crash."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollout_engine.kernels.cpu import build

PROGRAM = Path(__file__).with_name("wrong_tensors.py")


@pytest.mark.slow
@pytest.mark.skipif(build.load_kernels() is None, reason="the C++ kernels cannot be built here")
def test_no_wrapper_reads_what_it_was_not_written_for():
    done = subprocess.run([sys.executable, "-W", "error", PROGRAM, "0"], capture_output=True, text=True, timeout=500)
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith("FAILED")]
    assert done.returncode == 0, failures or f"it ended by {done.returncode} in: {lines[-1:]}, {done.stderr[-2000:]}"
    assert len(lines) > 3_000
