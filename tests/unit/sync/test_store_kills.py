"""A publisher killed anywhere leaves the old version or the new one, whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("num_kills", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_kill_leaves_a_torn_or_mixed_store(tmp_path, num_kills):
    command = [sys.executable, str(HERE / "publisher_kills.py"), str(tmp_path / "store"), str(num_kills), "7"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert (found["kills"], found["torn"], found["went_back"], found["refused"]) == (num_kills, 0, 0, 0)
    assert found["versions"] > num_kills / 4
