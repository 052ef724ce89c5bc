"""Attention's kernels compile for each kind of device, on any machine: the interpreter takes more than the compiler."""

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
SHARED_BYTES = {90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}
"""Of a multiprocessor."""
REGISTERS = 65_536
MOST_SPILLED = {90: 0, 100: 264, 120: 80}
"""Bytes of stack of a thread, measured: with wide heads, Blackwell's compiler keeps less in registers."""
MOST_SPILLED_LATENTS = {90: 160, 100: 968, 120: 0}
"""As many rows as Hopper's products of a warp group have, each with 512 channels."""
THREE_PROGRAMS = (
    "decode",
    "decode, 64 channels",
    "decode, 80 channels",
    "decode, after a prefix",
    "decode, everything in whole blocks",
)
"""Where a tile is within one block, three programs fit where shared memory is a Hopper's; two with 99 KiB."""
PROGRAMS_OF_DECODE = {
    "decode, blocks of 16": 2,
    "decode, everything": 2,
    "decode, 256 channels": 2,
    "decode, 32 query heads": 2,
}
TILE_INSTRUCTIONS = {
    "decode": 421,
    "decode, 64 channels": 300,
    "decode, blocks of 16": 631,
    "shared prefix": 803,
    "prefill": 503,
    "deterministic": 599,
}
"""What a warp of a Hopper issues for 64 keys, measured with the compiler of triton 3.6: decode is bound by that."""


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kind_of_kernel_compiles_and_as_many_programs_fit_as_are_started(tmp_path, capability):
    made = compile_all(tmp_path, capability)
    assert len(made) == 25
    for name, kernel in made.items():
        assert kernel["programs"] * (kernel["shared"] + 1024) <= SHARED_BYTES[capability], (name, kernel)
        assert kernel["programs"] * kernel["registers"] * kernel["threads"] <= REGISTERS, (name, kernel)
        most = (MOST_SPILLED_LATENTS if name == "latents, prefill" else MOST_SPILLED)[capability]
        assert kernel["stack"] <= most, (name, kernel)
    for name in ("decode", "decode, blocks of 16", "decode, everything", "prefill", "deterministic, everything"):
        assert made[name]["cp.async.cg"], f"{name} waits for every tile"
    programs = {name: made[name]["programs"] for name in made if name.startswith("decode")}
    assert programs == PROGRAMS_OF_DECODE | dict.fromkeys(THREE_PROGRAMS, 2 if capability == 120 else 3)
    if capability == 90:
        assert made["prefill"]["wgmma.mma"] and not made["prefill"]["mma.sync"]
        issued = {name: made[name]["tile_instructions"] for name in TILE_INSTRUCTIONS}
        assert all(0 < issued[name] <= 1.02 * most for name, most in TILE_INSTRUCTIONS.items()), issued


def compile_all(cache, capability):
    """Registers, spills and instructions by kernel name. Compiled in another process: this one uses the interpreter."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.kernels.triton.compile_attention", str(capability)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
