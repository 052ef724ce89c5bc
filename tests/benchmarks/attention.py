"""One attention layer while decoding: the C++ kernel's share of the read bandwidth, and its speed beside its twin's.

    python tests/benchmarks/attention.py --threads 2 --json

16 query and 8 key/value heads of 128 channels, bfloat16, blocks of 16. Several layers, each with a pool of its own, are
attended to in turn, so that no cache holds their KV. Ways alternate; the best of several rounds counts.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from rollout_engine.cli import machine
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.model.cpu.attention import CompiledPool
from rollout_engine.model.cpu.eager_attention import EagerPool
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.modules.geometry import LayerGeometry

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
DTYPE = torch.bfloat16
PARAMS = AttentionParams(HEAD_DIM**-0.5)
LAYER = LayerGeometry(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, PARAMS.scale, None, None, False)


class Case(NamedTuple):
    """Sequences that decode one token each."""

    num_sequences: int
    length: int
    """Of each one's context."""
    num_shared: int = 0
    """Of that, positions in blocks common to all."""

    @property
    def kv_bytes(self) -> int:
        """Of one layer, a shared position counted for every sequence."""
        return self.num_sequences * self.length * NUM_KV_HEADS * 2 * HEAD_DIM * DTYPE.itemsize

    def chunks(self) -> tuple[list[SequenceChunk], int]:
        """The step, over shuffled blocks, and how many blocks that takes."""
        shared, own = self.num_shared // BLOCK_SIZE, (self.length - self.num_shared) // BLOCK_SIZE
        free = torch.randperm(shared + self.num_sequences * own).tolist()
        tables = [free[:shared] + free[shared + i * own :][:own] for i in range(self.num_sequences)]
        return [SequenceChunk([0], self.length - 1, table) for table in tables], len(free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pool-bytes", type=int, default=1 << 30, help="KV of all layers; more than any cache holds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args.rounds, args.pool_bytes)
    if args.json:
        print(json.dumps({"machine": machine.describe(), "threads": args.threads} | result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:48} {value}")


def measure(rounds: int, pool_bytes: int) -> dict[str, float]:
    """Rates, shares and ratios by name."""
    result: dict[str, float] = {}
    for name, case in {"16 x 1,024": Case(16, 1024), "1 x 4,096": Case(1, 4096)}.items():
        bandwidth, kernel, twin = best_seconds(rounds, case, pool_bytes, CompiledPool, EagerPool)
        result[f"{name}: KV read, GB/s"] = round(case.kv_bytes / kernel / 1e9, 1)
        result[f"{name}: share of read bandwidth"] = round(case.kv_bytes / kernel / bandwidth, 2)
        result[f"{name}: times the twin's speed"] = round(twin / kernel, 1)
    grouped, ungrouped = Case(16, 1024 + BLOCK_SIZE, 1024), Case(16, 1024 + BLOCK_SIZE)
    _, together = best_seconds(rounds, grouped, pool_bytes, CompiledPool)
    bandwidth, apart = best_seconds(rounds, ungrouped, pool_bytes, CompiledPool)
    result["shared prefix of 1,024, group of 16: times ungrouped"] = round(apart / together, 2)
    result["read bandwidth, GB/s"] = round(bandwidth / 1e9, 1)
    return result


def best_seconds(rounds: int, case: Case, pool_bytes: int, *pools: type) -> list[float]:
    """Read bandwidth in bytes per second, then seconds per layer over each kind of pool; all taken in turn."""
    data = torch.ones(pool_bytes // 4)
    runs = [lambda: seconds_of(data.sum), *(layers_of(pool, case, pool_bytes) for pool in pools)]
    read, *layers = (min(times) for times in zip(*([run() for run in runs] for _ in range(rounds)), strict=True))
    return [data.nbytes / read, *layers]


def layers_of(pool_type: type, case: Case, pool_bytes: int) -> Callable[[], float]:
    """A function that decodes one step through as many layers as fill `pool_bytes`: seconds per layer."""
    chunks, num_blocks = case.chunks()
    batch = FlatBatch.of(chunks)
    layer_bytes = num_blocks * BLOCK_SIZE * NUM_KV_HEADS * 2 * HEAD_DIM * DTYPE.itemsize
    num_layers = max(1, pool_bytes // layer_bytes)
    pool = pool_type([LAYER] * num_layers, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=DTYPE)
    for tensor in pool.tensors():
        tensor.fill_(0.5)
    q = torch.randn(case.num_sequences, NUM_HEADS, HEAD_DIM).to(DTYPE)
    k, v = torch.randn(2, case.num_sequences, NUM_KV_HEADS, HEAD_DIM).to(DTYPE)

    def run() -> None:
        step = pool.step(batch)
        for layer in range(num_layers):
            step.attend(layer, q, k, v, PARAMS)

    return lambda: seconds_of(run) / num_layers


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
