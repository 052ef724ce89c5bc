"""Chains whose publisher is killed anywhere have the bits of a whole push."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A kill loses nothing that was written, on a disk or not: only the waits for a disk are spared."""


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_kill_leaves_wrong_bits_or_nothing_to_read(num_chains):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2])}
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        command = [sys.executable, str(HERE / "chain_kills.py"), directory, str(num_chains), "11"]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert (found["chains"], found["wrong"], found["refused"], found["warnings"]) == (num_chains, 0, [], 0)
    assert found["kills"] == 2 * num_chains and found["links"] > num_chains / 2
