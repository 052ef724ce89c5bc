"""Attention's kernels compile for a Hopper, on any machine: the interpreter accepts more than the compiler."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings no assembler for this machine")
def test_kernels_compile_and_fit(tmp_path):
    names = [
        "decode, everything",
        "prefill",
        "deterministic, everything",
        "merge, deterministic",
        "listing",
        "sharing",
    ]
    made = compile_all(tmp_path, *names)
    assert list(made) == names
    assert 0 < 2 * made["decode, everything"]["shared_bytes"] <= HOPPER_SHARED_BYTES  # two programs a multiprocessor
    assert 0 < made["prefill"]["shared_bytes"] <= HOPPER_SHARED_BYTES
    assert made["prefill"]["wgmma.mma"] and not made["prefill"]["mma.sync"]
    for name in names[:3]:
        assert made[name]["cp.async.cg"], f"{name} waits for every tile"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings no assembler for this machine")
def test_every_kind_of_kernel_compiles_and_fits(tmp_path):
    made = compile_all(tmp_path)
    assert len(made) == 12
    assert all(kernel["shared_bytes"] <= HOPPER_SHARED_BYTES for kernel in made.values())


def compile_all(cache, *names):
    """Registers, spills and instructions by kernel name. Compiled in another process: this one uses the interpreter."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.kernels.triton.compile_for_hopper", *names]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
