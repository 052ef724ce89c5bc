"""Attention on a CUDA device: shares of the bandwidth of a copy in the same run, and of torch's own attention.

    python tests/benchmarks/attention_gpu.py --json
    python tests/benchmarks/attention_gpu.py --tune decode      # other shapes of the products, fastest first

32 (or 16) query and 8 key/value heads of 128 channels, bfloat16, blocks of 64 in random order. Every figure is the
median of replays of a CUDA graph that goes through several layers, each with a pool of its own, so that no cache holds
their KV. Bytes are those of keys and values, each counted once per sequence.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_figures import DEVICE, Figure, captured, options, show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention, Prefixes
from rollout_engine.kernels.triton.shared_prefix import shared_prefixes
from rollout_engine.kernels.triton.tiling import Tiling

BLOCK_SIZE, DIM, NUM_KV_HEADS = 64, 128, 8
DTYPE = torch.bfloat16
PARAMS = AttentionParams(DIM**-0.5)
BYTES_PER_POSITION = NUM_KV_HEADS * 2 * DIM * DTYPE.itemsize


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pool-bytes", type=int, default=8 << 30, help="KV of all layers of a figure, at least")
    parser.add_argument("--tune", choices=["decode", "prefill", "groups"])
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args.replays, args.pool_bytes)
    show(bench.tune(args.tune) if args.tune else bench.measure(), as_json=args.json)


class Bench:
    """RowStats by name, one after the other."""

    def __init__(self, replays: int, pool_bytes: int) -> None:
        self._replays, self._pool_bytes = replays, pool_bytes

    def measure(self) -> Iterator[Figure]:
        """Everything but `tune`."""
        bandwidth = self.copy_bandwidth()
        yield "copy, GB/s read and written", round(bandwidth / 1e9)
        for num_heads, (name, lengths) in itertools.product((16, 32), DECODES.items()):
            for deterministic in (False, True):
                seconds = self.decode(num_heads, lengths, deterministic=deterministic)
                share = sum(lengths) * BYTES_PER_POSITION / seconds / bandwidth
                way = "ordered" if deterministic else "fast"
                yield f"decode, {num_heads} heads, {name}, {way}: share of copy", round(share, 3)
        for deterministic in (False, True):
            alone = self.decode(16, GROUPED, deterministic=deterministic)
            together = self.decode(16, GROUPED, deterministic=deterministic, samples=16, shared=2048)
            way = "ordered" if deterministic else "fast"
            yield f"decode, 32 prompts of 2,048 x 16, {way}: times ungrouped", round(alone / together, 2)
        for num_sequences, length in ((1, 8192), (4, 8192), (16, 1024)):
            name = f"prefill, {num_sequences} x {length:,}"
            ours, theirs = self.prefill(num_sequences, length), self.torch_prefill(num_sequences, length)
            flops = 4 * 32 * DIM * num_sequences * length * (length + 1) / 2
            yield f"{name}: TFLOP/s", round(flops / ours / 1e12)
            yield f"{name}: times torch's speed", round(theirs / ours, 2)
            ordered = self.prefill(num_sequences, length, deterministic=True)
            yield f"{name}, ordered: TFLOP/s", round(flops / ordered / 1e12)

    def tune(self, kind: str) -> Iterator[Figure]:
        """Microseconds of one layer, by tiling."""
        works: dict[str, Callable[[], float]]
        if kind == "decode":
            works = {name: partial(self.decode, 32, DECODES[name]) for name in TUNED_DECODES}
            candidates = _candidates("decode", (16,), (32, 64, 128), (2, 4), (3, 5), (1, 2, 3))
        elif kind == "prefill":
            works = {"4 x 8,192": partial(self.prefill, 4, 8192)}
            candidates = _candidates("prefill", (64, 128), (32, 64, 128), (4, 8), (3, 5), (1, 2))
        else:
            works = {"32 prompts of 2,048 x 16": partial(self.decode, 16, GROUPED, samples=16, shared=2048)}
            candidates = _candidates("shared_prefix", (64,), (32, 64, 128), (4, 8), (3, 5), (1, 2))
        figures = []
        for tiled, tiling in candidates:
            with _tiling(tiled, tiling):
                figures += [(name, self._tried(work), tiling) for name, work in works.items()]
        for name, microseconds, tiling in sorted(figures):
            yield f"{name}: {_named(tiling)}", microseconds

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second."""
        source = torch.ones(2 << 30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def decode(
        self, num_heads: int, lengths: list[int], *, deterministic: bool = False, samples: int = 1, shared: int = 0
    ) -> float:
        """Seconds per layer; groups of `samples` neighbours begin with the same `shared` positions."""
        heads = Heads(num_heads, NUM_KV_HEADS, DIM, DIM, DTYPE)
        tables, num_blocks = _tables(lengths, samples, shared)
        count = len(lengths)
        limits = Limits(count, count, max(lengths))
        attention = self._attention(heads, limits, deterministic)
        lens = torch.tensor(lengths, dtype=torch.int32)
        prefixes = None
        if shared:
            unit, tokens_per_item = attention.prefix_shape
            found = shared_prefixes(
                tables.numpy(),
                lens.numpy(),
                block_size=BLOCK_SIZE,
                unit=unit,
                tokens_per_item=tokens_per_item,
            )
            prefixes = Prefixes(
                *(torch.from_numpy(column).to(DEVICE) for column in (found.items, found.units, found.num_items))
            )
        starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
        attention.plan(Batch(starts, lens.to(DEVICE), tables.to(DEVICE), count, prefixes), {0})
        return self._per_layer(attention, heads, count, num_blocks)

    def prefill(self, num_sequences: int, length: int, *, deterministic: bool = False) -> float:
        """Seconds per layer of prompts from position 0."""
        heads = Heads(32, NUM_KV_HEADS, DIM, DIM, DTYPE)
        tables, num_blocks = _tables([length] * num_sequences, 1, 0)
        tokens = num_sequences * length
        attention = self._attention(heads, Limits(tokens, num_sequences, length), deterministic)
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=DEVICE) * length
        lens = torch.full((num_sequences,), length, dtype=torch.int32, device=DEVICE)
        attention.plan(Batch(starts, lens, tables.to(DEVICE), 0), {0})
        return self._per_layer(attention, heads, tokens, num_blocks)

    def torch_prefill(self, num_sequences: int, length: int) -> float:
        """The same by torch's own kernels, over KV that lies in one piece."""
        q = torch.randn(num_sequences, 32, length, DIM, dtype=DTYPE, device=DEVICE)
        k, v = torch.randn(2, num_sequences, NUM_KV_HEADS, length, DIM, dtype=DTYPE, device=DEVICE)
        return self._seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    def _attention(self, heads: Heads, limits: Limits, deterministic: bool) -> PagedAttention:
        return PagedAttention(heads, limits, DEVICE, block_size=BLOCK_SIZE, deterministic=deterministic)

    def _per_layer(self, attention: PagedAttention, heads: Heads, tokens: int, num_blocks: int) -> float:
        layer_bytes = num_blocks * BLOCK_SIZE * BYTES_PER_POSITION
        shape = num_blocks, NUM_KV_HEADS, BLOCK_SIZE, DIM, DIM
        layers = [
            KVLayer.zeros(*shape, dtype=DTYPE, device=DEVICE)
            for _ in range(min(16, max(2, self._pool_bytes // layer_bytes)))
        ]
        for pool in itertools.chain(*layers):
            pool.normal_()
        q = torch.randn(tokens, heads.num_heads, DIM, dtype=DTYPE, device=DEVICE)
        out = torch.empty_like(q)

        def run() -> None:
            for layer in layers:
                attention.attend(q, layer, PARAMS, out)

        return self._seconds(run) / len(layers)

    def _seconds(self, work: Callable[[], Any]) -> float:
        """Median of replays, after one to compile and one to warm up."""
        graph = captured(work, warm_up=work)
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self._replays + 1)]
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
        return statistics.median(times) / 1e3

    def _tried(self, work: Callable[[], float]) -> float:
        try:
            return round(work() * 1e6, 1)
        except Exception as error:  # of the compiler, or too much shared memory: not a shape for this device
            print(f"left out: {str(error).splitlines()[0]}")
            return float("inf")


DECODES = {
    "256 x 1,024": [1024] * 256,
    "256 x 2,048": [2048] * 256,
    "256 x 4,096": [4096] * 256,
    "256 x 8,192": [8192] * 256,
    "1 x 128k, 31 x 4k": [131072] + [4096] * 31,
    "1 x 32k": [32768],
    "2 x 32k": [32768] * 2,
    "4 x 32k": [32768] * 4,
    "8 x 32k": [32768] * 8,
    "256 of 100 to 1,024": np.random.default_rng(0).integers(100, 1025, 256).tolist(),
}
TUNED_DECODES = ("256 x 1,024", "1 x 128k, 31 x 4k", "1 x 32k")
GROUPED = [2048 + 256] * 512


def _tables(lengths: list[int], samples: int, shared: int) -> tuple[Tensor, int]:
    """Block tables over shuffled blocks, and how many blocks there are."""
    common, counts = shared // BLOCK_SIZE, [-(-length // BLOCK_SIZE) for length in lengths]
    groups = len(lengths) // samples
    free = torch.randperm(sum(counts) - common * (len(lengths) - groups)).to(torch.int32)
    num_blocks, used = len(free), 0
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for index, count in enumerate(counts):
        begun = common if index % samples else 0
        tables[index, :begun] = tables[index - index % samples, :begun]
        tables[index, begun:count] = free[used : used + count - begun]
        used += count - begun
    return tables, num_blocks


def _candidates(
    kind: str,
    heights: tuple[int, ...],
    tiles: tuple[int, ...],
    warps: tuple[int, ...],
    stages: tuple[int, ...],
    programs: tuple[int, ...],
) -> Iterator[tuple[str, Tiling]]:
    base = Heads(32, NUM_KV_HEADS, DIM, DIM, DTYPE).tiling(kind)
    for height, tile, *rest in itertools.product(heights, tiles, warps, stages, programs):
        yield kind, Tiling(height, tile, tile, *rest, deterministic=False, skips_masks=base.skips_masks)


@contextmanager
def _tiling(kind: str, tiling: Tiling) -> Iterator[None]:
    """Use `tiling` for this kind as it is, whatever the heads."""
    usual = Heads.tiling
    Heads.tiling = lambda heads, asked, *args: tiling if asked == kind else usual(heads, asked, *args)
    try:
        yield
    finally:
        Heads.tiling = usual


def _named(tiling: Tiling) -> str:
    return (
        f"rows {tiling.block_m} tile {tiling.tile} warps {tiling.num_warps} stages {tiling.num_stages}"
        f" programs {tiling.programs_per_processor}"
    )


if __name__ == "__main__":
    main()
