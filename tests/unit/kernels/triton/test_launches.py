"""Kernels are launched as Triton would launch them, on a stub of the driver library: a device is not needed."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_engine.kernels.triton import availability

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings no assembler for this machine"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub is written in C"),
    pytest.mark.skipif(availability._compiler_missing() is not None, reason="Triton cannot compile its launcher"),
]


def launch(tmp_path, *arguments):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.kernels.triton.launch_on_stub", *arguments]
    return subprocess.run(command, env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True)


@pytest.mark.slow
def test_what_is_found_is_what_triton_would_launch(tmp_path):
    done = launch(tmp_path, "small")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"compared": 36, "sees_planted_fault": True}


@pytest.mark.slow
def test_every_kernel_of_a_layer_is_launched_as_triton_would_in_half_the_time(tmp_path):
    done = launch(tmp_path, "whole")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["compared"] == 72
    found, bound = (figures["layer_seconds"][name] for name in ("found", "bound"))
    assert found < 0.6 * bound, figures
