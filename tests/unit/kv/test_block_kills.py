"""Processes that are killed anywhere leave blocks that are whole or absent, within the bound."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@pytest.mark.parametrize("num_kills", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_kill_leaves_wrong_bytes_or_more_than_the_bound(num_kills):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2])}
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        command = [sys.executable, str(HERE / "block_kills.py"), f"{directory}/kv", str(num_kills), "5"]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert found.pop("read") > num_kills
    assert found == dict(kills=num_kills, wrong=0, faults=0, over=0, unfinished=0)
