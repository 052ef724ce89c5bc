"""The kernels beside attention compile for a Hopper, on any machine; the interpreter accepts more than the compiler."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings no assembler for this machine"),
]
HOPPER_SHARED_BYTES = 227 * 1024
KERNELS = {"_norm", "_gated", "_rotary", "_matmul", "_chunk", "_row", "_active", "_edge", "_top", "_copy", "_piece"}
KERNELS |= {"_copy_edited", "_edit", "_outcome", "_edited_outcome", "_prepare", "_block_copy", "_shrink", "_expand"}
KERNELS |= {"_choose", "_group", "_multiply", "_add", "_by_head"}
KERNELS |= {"_convolve", "_keep", "_recur", "_backward", "_gated_norm", "_l2"}


def test_every_kernel_compiles_without_spills_and_reads_wide(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.kernels.triton.compile_calls_for_hopper"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in made} == {f"{name}_kernel" for name in KERNELS}
    assert not [kernel for kernel in made if kernel["stack"] or kernel["shared"] > HOPPER_SHARED_BYTES]
    for name in ("_norm", "_gated", "_chunk", "_row", "_copy", "_piece", "_copy_edited", "_block_copy"):
        assert [k for k in made if k["kernel"] == f"{name}_kernel" and k["wide_loads"]], f"{name} reads narrowly"
    ahead = [kernel for kernel in made if kernel["kernel"] in ("_piece_kernel", "_shrink_kernel")]
    assert all(kernel["cp.async.cg"] for kernel in ahead), "no loads ahead"
    draws = {f"_{name}_kernel" for name in ("chunk", "row", "active", "edge", "top", "edited_outcome", "choose")}
    assert not [kernel for kernel in made if kernel["kernel"] in draws and kernel["div.full"]], (
        "a quotient off by 2 ulp"
    )
    for name, num_in_bfloat16 in (("_matmul", 3), ("_multiply", 3), ("_by_head", 2)):
        products = [kernel for kernel in made if kernel["kernel"] == f"{name}_kernel"]
        is_ahead = (
            all(kernel["cp.async.cg"] for kernel in products) or name == "_by_head"
        )  # its absorb is one tile of K
        assert is_ahead and not any(kernel["mma.sync"] for kernel in products)
        assert len([kernel for kernel in products if kernel["wgmma.mma"]]) >= num_in_bfloat16


def test_chunks_behind_any_number_of_decodes_are_planned_by_one_kernel(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.kernels.triton.list_on_hopper"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
