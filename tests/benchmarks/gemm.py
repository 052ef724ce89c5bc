"""Our row-invariant product beside oneDNN's: called so that rows are independent, and as fast as it goes.

    python tests/benchmarks/gemm.py M L --rows 1 16 64 --threads 1 --out gemm.json

For each weight shape of a model and each number of rows: microseconds (the least of alternating calls), the share of a
second's work as GFLOP/s and GB/s of weights, and how many times longer oneDNN takes with the first `RowPlan` that
keeps rows independent (`plan`), and in one call that does not (`free`). Weights rotate, so that none stays in a cache
that a whole model would flush. `pack` is the rate of packing a weight, in bytes of it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm

SHAPES = {
    "S": (torch.float32, [(256, 128), (128, 128), (768, 128), (128, 384), (4096, 128)]),
    "M": (torch.bfloat16, [(1280, 768), (768, 768), (4096, 768), (768, 2048)]),
    "L": (torch.bfloat16, [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)]),
}
"""[out_features, in_features] of q/k/v, output, gate/up, down and head; M's head is as its gate/up."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_ROTATED_BYTES = 64 << 20
_SECONDS_A_CASE = 0.15
_JUDGED_ROWS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of the model's own")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for model in args.models:
        dtype = getattr(torch, args.dtype) if args.dtype else SHAPES[model][0]
        for shape in SHAPES[model][1]:
            for result in measure(shape, dtype, args.rows):
                results.append({"model": model, "threads": args.threads, **result})
                print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(shape: tuple[int, int], dtype: torch.dtype, row_counts: list[int]) -> Iterator[dict[str, object]]:
    """One result per number of rows."""
    out_features, in_features = shape
    num_bytes = out_features * in_features * dtype.itemsize
    count = max(1, min(8, _ROTATED_BYTES // num_bytes))
    weights = [torch.randn(shape).to(dtype) for _ in range(count)]
    plan = invariant_plan(shape, dtype)
    own = [gemm.pack(weight) for weight in weights]
    theirs = [linear.pack(weight, plan) for weight in weights]
    pack_seconds = fastest([lambda: gemm.pack(weights[0])])[0]
    for rows in row_counts:
        x = torch.randn(rows, in_features).to(dtype)
        free = linear.RowPlan(linear.ONEDNN, 1, 1 << 40) if plan.kernel == linear.ONEDNN else linear.PLAIN
        seconds, planned, unbound = (
            total / count
            for total in fastest(
                [
                    lambda x=x: [gemm.matmul(x, weight, None) for weight in own],
                    lambda x=x: [linear.matmul(x, weight, None, plan) for weight in theirs],
                    lambda x=x, free=free: [linear.matmul(x, weight, None, free) for weight in theirs],
                ]
            )
        )
        yield {
            "shape": f"{out_features}x{in_features}",
            "dtype": str(dtype).removeprefix("torch."),
            "rows": rows,
            "us": round(seconds * 1e6, 1),
            "GFLOP/s": round(2 * rows * out_features * in_features / seconds / 1e9),
            "GB/s": round(num_bytes / seconds / 1e9, 1),
            "plan": round(planned / seconds, 2),
            "free": round(unbound / seconds, 2),
            "pack": round(num_bytes / pack_seconds / 1e9, 1),
        }


def invariant_plan(shape: tuple[int, int], dtype: torch.dtype) -> linear.RowPlan:
    """The plan that would serve without our kernel; a vocabulary is judged by its first rows."""
    out_features, in_features = min(shape[0], _JUDGED_ROWS), shape[1]
    return next(plan for plan in linear._LIBRARY_PLANS if linear._proven(plan, out_features, in_features, dtype))


def fastest(calls: list[Callable[[], Tensor | list[Tensor] | gemm.PackedWeight]]) -> list[float]:
    """Seconds of each, the least of several; they take turns."""
    least = [float("inf")] * len(calls)
    end = time.perf_counter() + _SECONDS_A_CASE * len(calls)
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            least[index] = min(least[index], time.perf_counter() - start)
        rounds += 1
    return least


if __name__ == "__main__":
    main()
