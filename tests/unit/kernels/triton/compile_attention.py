"""Compile attention's kernels for a device, where none need be, and print what each takes, as JSON.

    python -m tests.unit.kernels.triton.compile_attention 90|100|120 [name ...]

The interpreter accepts what the compiler does not; this is the other half of the proof.
"""

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_engine.kernels.triton import tiling as tilings
from rollout_engine.kernels.triton import work
from rollout_engine.kernels.triton.attention_kernel import attention_kernel
from rollout_engine.kernels.triton.attention_shape import Lists, Output, Parts, Pool, Queries, ScoreFactors, Shape
from rollout_engine.kernels.triton.merge_kernel import merge_kernel
from rollout_engine.kernels.triton.paged_attention import Heads
from rollout_engine.kernels.triton.tiling import Tiling
from tests.unit.kernels.triton.compile_calls_for_hopper import dumped, row_stats

SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Shared memory that a program may have, by compute capability: Hopper, and Blackwell for servers and for consumers."""
TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
EVERYTHING = dict.fromkeys(("has_window", "has_softcap", "has_sinks", "has_initial", "writes_lse"), True)


def attention(kind: str, heads: tuple[int, int], dim: int, block_size: int, **flags: bool) -> Any:
    """The attention kernel of one of `tilings`, in bfloat16, and its programs on a multiprocessor."""
    tiling = Heads(*heads, dim, dim, torch.bfloat16).tiling(kind, SHARED_BYTES[TARGET.arch], block_size)
    shape = shape_of(tiling, heads, dim, block_size, **flags)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, "maxnreg": tiling.max_registers}
    made = compiled(attention_kernel, attention_arguments(), {"SHAPE": shape}, **options)
    return made, tiling.programs_per_processor


def latents(kind: str, num_heads: int, block_size: int, **flags: bool) -> Any:
    """The attention kernel over latents of DeepSeek's sizes, and its programs on a multiprocessor."""
    heads = Heads.of(num_heads, 1, 576, 512, torch.bfloat16, has_latents=True)
    tiling = heads.tiling(kind, SHARED_BYTES[TARGET.arch], block_size)
    shape = shape_of(tiling, (num_heads, heads.num_kv_heads), 512, block_size, **flags)
    shape = shape._replace(dim_k=576, block_k=1024, has_latents=True, block_r=64)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, "maxnreg": tiling.max_registers}
    made = compiled(attention_kernel, attention_arguments(), {"SHAPE": shape}, **options)
    return made, tiling.programs_per_processor


def merge(deterministic: bool) -> Any:
    """The merge kernel."""
    tiling = (tilings.deterministic if deterministic else tilings.decode)(2, 128, 128, 2)
    arguments = attention_arguments()
    shape = shape_of(tiling, (16, 8), 128, 16, writes_lse=True)
    return compiled(merge_kernel, {name: arguments[name] for name in ("work", "parts", "output")}, {"SHAPE": shape})


def listing() -> Any:
    """The kernel that lists items."""
    names = "items", "num_items", "token_starts", "context_lens", "prefix_units"
    numbers = dict.fromkeys(("num_sequences", "first_sequence", "sliding_window"), "i32")
    arguments = dict.fromkeys(names, "*i32") | numbers
    constants = {"HAS_PREFIXES": True, "HAS_WINDOW": True, "TOKENS": 1, "UNIT": 64, "COLUMNS": work.COLUMNS}
    return compiled(work._list_items, arguments, constants | {"BLOCK_N": 256, "BLOCK_T": 32})


def sharing() -> Any:
    """The kernel that divides the line of units."""
    arguments = dict.fromkeys(("items", "num_items", "shares", "line"), "*i32")
    constants = {"NUM_PROGRAMS": 264, "NUM_KV_HEADS": 8, "IS_WHOLE": True, "COLUMNS": work.COLUMNS, "BLOCK": 1024}
    return compiled(work._share_out, arguments, constants)


KERNELS = {
    "decode": lambda: attention("decode", (16, 8), 128, 64),
    "decode, blocks of 16": lambda: attention("decode", (16, 8), 128, 16),
    "decode, 256 channels": lambda: attention("decode", (16, 8), 256, 64),
    "decode, 64 channels": lambda: attention("decode", (14, 2), 64, 64),
    "decode, 80 channels": lambda: attention("decode", (32, 8), 80, 64),
    "decode, 32 query heads": lambda: attention("decode", (32, 1), 128, 64),
    "decode, after a prefix": lambda: attention("decode", (16, 8), 128, 64, has_initial=True),
    "decode, everything in whole blocks": lambda: attention("decode", (16, 8), 128, 64, **EVERYTHING),
    "decode, everything": lambda: attention("decode", (14, 2), 64, 48, **EVERYTHING),
    "shared prefix": lambda: attention("shared_prefix", (32, 8), 128, 16, writes_parts=True, has_sinks=True),
    "prefill": lambda: attention("prefill", (16, 8), 128, 16),
    "prefill, everything": lambda: attention("prefill", (14, 2), 80, 64, **EVERYTHING),
    "prefill, 256 channels": lambda: attention("prefill", (16, 8), 256, 16),
    "deterministic": lambda: attention("deterministic", (16, 8), 128, 16),
    "deterministic, everything": lambda: attention("deterministic", (14, 2), 64, 16, **EVERYTHING),
    "latents, decode": lambda: latents("decode", 128, 64),
    "latents, decode of 16 heads": lambda: latents("decode", 16, 64, has_initial=True),
    "latents, shared prefix": lambda: latents("shared_prefix", 128, 64, writes_parts=True),
    "latents, prefill": lambda: latents("prefill", 128, 64),
    "latents, deterministic": lambda: latents("deterministic", 128, 16),
    "latents, deterministic, everything": lambda: latents("deterministic", 16, 64, **EVERYTHING),
    "merge": lambda: merge(False),
    "merge, deterministic": lambda: merge(True),
    "listing": listing,
    "sharing": sharing,
}


def tile_instructions(kernel: Any) -> int:
    """Instructions that a warp issues for a tile: of the shortest loop with matrix products; 0 without such a loop."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", dumped(kernel, "-sass"))]
    lengths = []
    for end, text in code:
        start = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if start and int(start[1], 16) < end:
            loop = [text for at, text in code if int(start[1], 16) <= at <= end]
            if any(re.search(r"\b\w*MMA\b", text) for text in loop):
                lengths.append(len(loop))
    return min(lengths, default=0)


def attention_arguments() -> dict[str, Any]:
    """Types of the attention kernel's arguments."""
    parts, strides = Parts("*fp32", "*fp32", "*fp32"), ("i32", "i32", "i32")
    return {
        "q": Queries("*bf16", "i32", "i32"),
        "pool": Pool("*bf16", "*bf16", strides, strides, "*i32", "i32"),
        "work": Lists("*i32", "*i32", "*i32"),
        "parts": parts,
        "output": Output("*bf16", "i32", "i32", "*fp32", parts),
        "sinks": "*bf16",
        "initial": parts,
        "numbers": ScoreFactors("fp32", "fp32", "i32"),
    }


def shape_of(tiling: Tiling, heads: tuple[int, int], dim: int, block_size: int, **flags: bool) -> Shape:
    absent = dict.fromkeys(
        ("has_window", "has_softcap", "has_sinks", "has_initial", "writes_parts", "writes_lse"), False
    )
    return Shape(
        group=heads[0] // heads[1],
        num_kv_heads=heads[1],
        dim_k=dim,
        dim_v=dim,
        block_k=triton.next_power_of_2(dim),
        block_v=triton.next_power_of_2(dim),
        block_size=block_size,
        block_m=tiling.block_m,
        tile=tiling.tile,
        tiles_per_unit=tiling.unit // tiling.tile,
        rows=tiling.block_m,
        slots=9,
        deterministic=tiling.deterministic,
        skips_masks=tiling.skips_masks,
        **(absent | flags),
    )


def compiled(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], **options: int | None) -> Any:
    """Compiled with pointers and strides in multiples of 16, as torch gives them."""
    signature = arguments | dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {path: [["tt.divisibility", 16]] for path, kind in _leaves(tuple(signature.values())) if kind != "fp32"}
    return triton.compile(ASTSource(kernel, signature, values, aligned), target=TARGET, options=options)


def _leaves(tree: Any, path: tuple[int, ...] = ()) -> Any:
    if isinstance(tree, tuple):
        for index, branch in enumerate(tree):
            yield from _leaves(branch, (*path, index))
    elif tree != "constexpr":
        yield path, tree


if __name__ == "__main__":
    stats = {}
    for name in sys.argv[2:] or KERNELS:
        made = KERNELS[name]()
        made, programs = made if isinstance(made, tuple) else (made, 1)
        stats[name] = row_stats(made) | {"programs": programs, "tile_instructions": tile_instructions(made)}
    print(json.dumps(stats, indent=1))
