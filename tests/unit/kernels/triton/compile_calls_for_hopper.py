"""Compile the kernels beside attention for a Hopper, where none need be, and print what each takes, as JSON lines.

    python -m tests.unit.kernels.triton.compile_calls_for_hopper

Their own functions are called, on tensors of real shapes in host memory; every launch reaches a stub of the driver
library. So the strides, alignments and constants that the compiler sees are those of a device.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import empty
from triton.backends import nvidia

from rollout_engine.kernels import routing_rule
from rollout_engine.kernels.cpu.adapters import AdapterRows
from rollout_engine.kernels.routing_rule import RoutingRule
from rollout_engine.kernels.row_stats import KeptTokens, RowStats, Truncation
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.adapters import BLOCK_ROWS, AdapterBatch, AdapterPair, AdapterTable
from rollout_engine.kernels.triton.block_copies import BlockCopies
from rollout_engine.kernels.triton.convolution import convolve
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.kernels.triton.decode_inputs import prepare
from rollout_engine.kernels.triton.experts import Groups, add_weighted, multiply
from rollout_engine.kernels.triton.gated_norm import gated_norm, l2_normalise
from rollout_engine.kernels.triton.latent import absorb, expand
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.logit_edits import edit
from rollout_engine.kernels.triton.matmul import matmul
from rollout_engine.kernels.triton.norm import add_rms_norm, rms_norm
from rollout_engine.kernels.triton.outcome import write_edited_outcomes, write_outcomes
from rollout_engine.kernels.triton.recurrence import recur
from rollout_engine.kernels.triton.recurrence_backward import find_gradients
from rollout_engine.kernels.triton.rotary import HeadNorms, Rotary, rotate_and_write
from rollout_engine.kernels.triton.routers import Routes, choose
from rollout_engine.kernels.triton.sampling import SamplingRows, SamplingWorkspace, sample
from rollout_engine.kernels.triton.top_tokens import top_tokens
from rollout_engine.kernels.triton.truncation import truncate
from sync.digest_kernel import DeviceCheck
from tests.unit.kernels.triton.driver_stub import activate

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
VOCAB_SIZE = 151_936


def call_everything(dtype: torch.dtype) -> None:
    """Every kernel, in shapes of Qwen3-0.6B."""
    weight, hidden = empty(1024, dtype=dtype), empty(256, 1024, dtype=dtype)
    rms_norm(hidden, weight, 1e-6, hidden)
    add_rms_norm(hidden, hidden, weight, 1e-6, hidden)
    gate, up = empty(256, 6144, dtype=dtype).chunk(2, dim=1)
    gated(gate, up, gate)
    gated(gate, up, gate, "gelu_tanh")
    qkv = empty(256, 32 * 128, dtype=dtype).split([2048, 1024, 1024], dim=1)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in qkv)
    layer = KVLayer.zeros(4, 8, 16, 128, 128, dtype=dtype, device="cpu")
    columns = empty(256, dtype=torch.int64)
    for rotated, is_interleaved, norms in ((128, False, HeadNorms(weight, weight, 1e-6)), (64, True, None)):
        rotary = Rotary(empty(64, rotated, dtype=dtype), empty(64, rotated, dtype=dtype), is_interleaved)
        rotate_and_write(q, k, v, columns, columns, rotary, layer, q, norms)
    for out_features, bias in ((1024, None), (6144, None), (4096, empty(4096, dtype=dtype)), (VOCAB_SIZE, None)):
        shared = empty(1, 1024, dtype=dtype).expand(out_features, 1024)
        matmul(hidden, shared, bias, empty(256, out_features, dtype=dtype))
    call_experts(dtype)
    call_state_layers(dtype)
    table = AdapterTable(8, 1024, [2048, 1024, 1024], dtype, torch.device("cpu"))
    pairs = [AdapterPair.packed(empty(32, 1024), empty(size, 32), 1.0, dtype) for size in table.sizes]
    table.set(0, pairs)
    plan = AdapterRows.of([0, 1], [200, 56], BLOCK_ROWS)
    table.add(hidden, empty(256, 4096, dtype=dtype), AdapterBatch.of(plan, torch.device("cpu")))
    tables, lens = empty(256, 2560, dtype=torch.int32), empty(256, dtype=torch.int32)
    prepare(columns, columns, lens, (columns, lens, 9), columns, tables, tables, 16)
    call_sampling(dtype)
    BlockCopies(list(layer)).run(empty(9, 2, dtype=torch.int64))
    FusedCopy([(hidden, hidden.clone()), (empty(9)[1:], empty(8))]).run()
    check = DeviceCheck()
    check.add(hidden)
    check.results()


def call_experts(dtype: torch.dtype) -> None:
    """A mixture, in shapes of Qwen3-30B-A3B."""
    num_tokens, num_experts, top_k, hidden, intermediate = 256, 128, 8, 2048, 768
    x, logits = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens, num_experts, dtype=dtype)
    weights, experts = empty(num_tokens, top_k, dtype=dtype), empty(num_tokens, top_k, dtype=torch.int32)
    choose(logits, weights, experts, RoutingRule(True, True))
    choose(logits, weights.float(), experts, RoutingRule(False, False), scores=logits.float())
    rule = RoutingRule(True, False, True, True, routing_rule.Groups(8, 4, True), 2.5, 1e-20, 1e-9)
    sums, bias, slots = empty(num_tokens, 256), empty(256), empty(num_tokens, dtype=torch.int64)
    choose(sums, weights.float(), experts, rule, bias=bias, routes=Routes(experts, experts.short(), slots))
    matmul(x, empty(256, hidden, dtype=dtype), None, sums)
    matmul(x, empty(1, hidden, dtype=dtype), None, empty(num_tokens, 1, dtype=dtype))
    groups = Groups.of(experts, num_experts)
    projected, outputs = (
        empty(len(groups.order), 2 * intermediate, dtype=dtype),
        empty(num_tokens, top_k, hidden, dtype=dtype),
    )
    gate_up = empty(num_experts, 2 * intermediate, hidden, dtype=dtype)
    multiply(x, gate_up, groups, projected, top_k=top_k)
    down = empty(num_experts, hidden, intermediate, dtype=dtype)
    multiply(projected[:, :intermediate], down, groups, outputs.flatten(0, 1), by_entry=True)
    add_weighted(outputs, weights, x)
    multiply(x, empty(num_experts, hidden, 2 * intermediate, dtype=dtype).mT, groups, projected, top_k=top_k)
    matrix, q = empty(16, 256, 512, dtype=dtype), empty(num_tokens, 16, 192, dtype=dtype)  # DeepSeek-V2-Lite
    expand(absorb(q, matrix, 128)[..., :512], matrix, 128)


def call_state_layers(dtype: torch.dtype) -> None:
    """Layers that keep a state: the gated delta rule of Qwen3.5, KDA of Kimi Linear, and Mamba 2 of Nemotron-H."""
    chunks = StateChunks([0, 1, 32], [0, -1], [0, 1, 3], [1, 9, 32], [0, 1, 2])
    kept, rows = StateChunks.whole([32]).write_every(64), empty(32, 8192, dtype=dtype)
    convolve(rows, empty(8192, 4, dtype=dtype), None, silu=True, chunks=chunks, states=empty(3, 3, 8192, dtype=dtype))
    convolve(rows, empty(8192, 4, dtype=dtype), rows[0], silu=False, chunks=kept, states=None)
    for heads, groups, key, value, delta, by_channel in (
        (32, 16, 128, 128, True, False),
        (32, 32, 128, 128, True, True),
        (64, 8, 128, 64, False, False),
    ):
        q, v = empty(32, groups, key, dtype=torch.float32 if delta else dtype), empty(32, heads, value, dtype=dtype)
        decay, rate = empty(32, heads, *[key] * by_channel), empty(32, heads)
        given, rule = (q, q, v, decay, rate, None if delta else rate[0]), {"delta": delta, "scale": 1.0}
        recur(*given, **rule, chunks=chunks, states=empty(3, heads, key, value))
        find_gradients(*given, empty(0, heads, key, value), v, **rule, chunks=kept)
    z = empty(256, 32, 128, dtype=dtype)
    l2_normalise(z, 1e-6)
    rms_norm(z, z[0, 0], 1e-6, z, has_offset=True)
    add_rms_norm(z[0], z[1], z[0, 0], 1e-6, z[1], has_offset=True)
    for size, gate_first, is_sigmoid in ((128, False, False), (128, False, True), (8192, True, False)):
        x = empty(256, size, dtype=dtype)
        how = {"group_size": size, "gate_first": gate_first, "is_sigmoid": is_sigmoid, "rounds_norm": True}
        gated_norm(x, x, x[0], 1e-6, **how)


def call_sampling(dtype: torch.dtype) -> None:
    """Kernels that read logits."""
    n = 4
    logits, floats, ints = empty(n, VOCAB_SIZE, dtype=dtype), empty(n), empty(n, dtype=torch.int64)
    rows = SamplingRows(floats, ints, ints, ints.int())
    workspace, stats = SamplingWorkspace.empty(n, VOCAB_SIZE, "cpu"), RowStats.empty(n, "cpu")
    kept = KeptTokens(floats.double(), floats, ints)
    sample(logits, rows, workspace, stats)
    truncate(logits, rows, Truncation(floats.double(), ints, floats.double(), floats.double()), workspace, stats, kept)
    top_ids, top_logprobs = empty(n, 20, dtype=torch.int32), empty(n, 20)
    top_tokens(logits, floats, workspace, stats, top_ids, top_logprobs, kept)
    edited, truncates, outcome = empty(n, VOCAB_SIZE), empty(n, dtype=torch.bool), empty(4, n, dtype=torch.float64)
    edit(logits, ints, ints, ints, ints, ints, edited)
    for rules in (None, kept):
        write_outcomes(stats, rules, truncates, outcome, ints, ints)
        told = rules, truncates, outcome, ints, ints
        write_edited_outcomes(logits, floats, stats, ints, edited, stats, workspace, *told)


def row_stats(kernel: Any) -> dict[str, int]:
    """Registers, bytes of stack (spills) and of shared memory, and instructions that show a good kernel."""
    usage = dumped(kernel, "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))
    ptx = kernel.asm["ptx"]
    wide = len(re.findall(r"ld\.global[.\w]*\.v(?:4\.b32|2\.b64)", ptx))
    counts = {name: ptx.count(name) for name in ("wgmma.mma", "mma.sync", "cp.async.cg", "div.full")}
    sizes = {"shared": kernel.metadata.shared, "threads": 32 * kernel.metadata.num_warps}
    return {"registers": registers, "stack": stack, "wide_loads": wide} | sizes | counts


def dumped(kernel: Any, what: str) -> str:
    """What cuobjdump prints of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Compile all, and print."""
    with tempfile.TemporaryDirectory() as folder:
        stub = activate(Path(folder))
        call_everything(torch.bfloat16)
        call_everything(torch.float32)
    for kernel in stub.kernels.values():
        print(json.dumps({"kernel": kernel.name} | row_stats(kernel)))


if __name__ == "__main__":
    main()
