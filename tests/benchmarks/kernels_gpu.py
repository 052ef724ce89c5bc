"""The Triton kernels beside attention on a CUDA device: shares of the bandwidth and the GEMM rate of the same run.

    python tests/benchmarks/kernels_gpu.py --json
    python tests/benchmarks/kernels_gpu.py --tune      # other tiles of the product, fastest first

Shapes of Qwen3-0.6B (hidden 1,024) and 8B (hidden 4,096), bfloat16, random. Every figure is the median of replays of a
CUDA graph of many calls, each on buffers of its own, together larger than any cache. Bytes are those that must move:
every operand read once, every result written once.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from gpu_figures import DEVICE, Figure, captured, options, show
from torch import Tensor

from rollout_engine.kernels.row_stats import KeptTokens, RowStats, Truncation
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.matmul import Tile, matmul, tile_for
from rollout_engine.kernels.triton.norm import add_rms_norm
from rollout_engine.kernels.triton.rotary import HeadNorms, Rotary, rotate_and_write
from rollout_engine.kernels.triton.sampling import SamplingRows, SamplingWorkspace, sample
from rollout_engine.kernels.triton.top_tokens import top_tokens
from rollout_engine.kernels.triton.truncation import truncate

DTYPE = torch.bfloat16
VOCAB_SIZE = 151_936
CACHES = 256 << 20
"""Bytes that no cache holds."""
PRODUCTS = {"qkv of 0.6B": (4096, 1024), "down of 0.6B": (1024, 3072), "gate and up of 8B": (24576, 4096)}
Figures = Iterator[Figure]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args.replays)
    show(bench.tune() if args.tune else bench.measure(), as_json=args.json)


class Bench:
    """RowStats by name, one after the other."""

    def __init__(self, replays: int) -> None:
        self._replays = replays
        self._bandwidth = 0.0

    def measure(self) -> Figures:
        """Everything but `tune`."""
        self._bandwidth = self._copy_bandwidth()
        yield "copy, GB/s read and written", round(self._bandwidth / 1e9)
        a, b = _random(8192, 8192), _random(8192, 8192)
        seconds = self._seconds(lambda: lambda: F.linear(a, b), 0)
        yield "GEMM of torch, 8,192 cubed: TFLOP/s", round(2 * 8192**3 / seconds / 1e12)
        yield from self._elementwise()
        yield from self._sampling()
        yield from self._products()
        yield from self._commit()

    def tune(self) -> Figures:
        """Microseconds of a product, by tile; those of few rows and of many must come from one tile."""
        stats = {}
        tiles = itertools.product((64, 128), (32, 64, 128, 256), (64, 128), (4, 8), (3, 4, 5))
        for (name, (n, k)), tile in itertools.product(PRODUCTS.items(), itertools.starmap(Tile, tiles)):
            for rows in (16, 256, 8192):
                try:
                    seconds = self._product(rows, n, k, tile)
                except Exception as error:  # the compiler refuses tiles that do not fit, in several ways
                    torch.cuda.synchronize()
                    print(f"{name} {tile}: {type(error).__name__}")
                    break
                stats[f"{name}, {rows} rows, {tuple(tile)}"] = round(seconds * 1e6, 1)
        yield from sorted(stats.items(), key=lambda figure: (figure[0].split(" rows")[0], figure[1]))

    def _elementwise(self) -> Figures:
        for hidden, tokens in itertools.product((1024, 4096), (1, 256, 8192)):
            name = f"{tokens:,} x {hidden:,}"
            weight, size = _random(hidden), tokens * hidden * DTYPE.itemsize

            def norm(tokens: int = tokens, hidden: int = hidden, weight: Tensor = weight) -> Callable[[], object]:
                x, delta = _random(tokens, hidden), _random(tokens, hidden)
                return lambda: add_rms_norm(x, delta, weight, 1e-6, delta)

            def activation(tokens: int = tokens, hidden: int = hidden) -> Callable[[], object]:
                gate, up = _random(tokens, 6 * hidden).chunk(2, dim=1)
                out = torch.empty(tokens, 3 * hidden, dtype=DTYPE, device=DEVICE)
                return lambda: gated(gate, up, out)

            yield from self._bandwidth_share(f"residual + RMSNorm, {name}", norm, 4 * size)
            yield from self._bandwidth_share(f"SiLU x up, {tokens:,} x {3 * hidden:,}", activation, 9 * size)
        for tokens, heads in itertools.product((1, 256, 8192), (16, 32)):
            size = tokens * (2 * heads + 4 * 8) * 128 * DTYPE.itemsize

            def rotary(tokens: int = tokens, heads: int = heads) -> Callable[[], object]:
                return _rotary_call(tokens, heads)

            yield from self._bandwidth_share(
                f"head norms + rotary + KV write, {tokens:,} tokens, {heads} heads", rotary, size
            )

    def _sampling(self) -> Figures:
        for rows in (1, 8, 64, 256, 1024):
            size = rows * VOCAB_SIZE * DTYPE.itemsize
            kinds: dict[str, tuple[dict[str, float], float]] = {
                "temperature": ({}, 3.0),
                "top-k 20, top-p 0.95": ({"top_k": 20, "top_p": 0.95}, 3.0),
                "top-p 0.95": ({"top_p": 0.95}, 3.0),
                "top-p 0.95 of flat rows": ({"top_p": 0.95}, 0.1),
                "20 log-probs": ({"num_top": 20}, 3.0),
            }
            for name, (rules, scale) in kinds.items():

                def call(rows: int = rows, rules: dict = rules, scale: float = scale) -> Callable[[], object]:
                    return _sampling_call(rows, scale, **rules)

                seconds = self._seconds(call, size)
                yield f"sampling, {rows} rows, {name}: us", round(seconds * 1e6, 1)
                yield f"sampling, {rows} rows, {name}: times reading", round(seconds * self._bandwidth / size, 2)
            logits = _random(rows, VOCAB_SIZE)
            seconds = self._seconds(lambda x=logits: lambda: x.float().log_softmax(-1), 0)
            yield f"log_softmax of torch alone, {rows} rows: us", round(seconds * 1e6, 1)

    def _products(self) -> Figures:
        for (name, (n, k)), rows in itertools.product(PRODUCTS.items(), (1, 16, 64, 256, 1024, 8192)):
            ours, theirs = self._product(rows, n, k, None), self._product(rows, n, k, None, by_torch=True)
            yield f"product, {name}, {rows} rows: TFLOP/s", round(2 * rows * n * k / ours / 1e12, 1)
            share = (n * k + rows * (n + k)) * DTYPE.itemsize / ours / self._bandwidth
            yield f"product, {name}, {rows} rows: share of copy", round(share, 3)
            yield f"product, {name}, {rows} rows: times torch's speed", round(theirs / ours, 2)

    def _product(self, rows: int, n: int, k: int, tile: Tile | None, *, by_torch: bool = False) -> float:
        def call() -> Callable[[], object]:
            x, weight, out = _random(rows, k), _random(n, k), torch.empty(rows, n, dtype=DTYPE, device=DEVICE)
            if by_torch:
                return lambda: torch.mm(x, weight.T, out=out)
            return lambda: matmul(x, weight, None, out, tile or tile_for(n, k, DTYPE))

        return self._seconds(call, n * k * DTYPE.itemsize)

    def _commit(self) -> Figures:
        for name, hidden, layers in (("0.6B", 1024, 28), ("8B", 4096, 36)):
            shapes = [(VOCAB_SIZE, hidden)]
            for _ in range(layers):
                shapes += [(4 * hidden, hidden), (hidden, 2 * hidden), (6 * hidden, hidden), (hidden, 3 * hidden)]
                shapes += [(hidden,), (hidden,), (128,), (128,)]
            pairs = [(_random(*shape), torch.empty(shape, dtype=DTYPE, device=DEVICE)) for shape in shapes]
            copy = FusedCopy(pairs)
            seconds = self._seconds(lambda copy=copy: copy.run, copy.num_bytes)
            yield f"commit of {name}, {copy.num_bytes / 1e9:.1f} GB: ms", round(seconds * 1e3, 3)
            share = 2 * copy.num_bytes / seconds / self._bandwidth
            yield f"commit of {name}: share of copy", round(share, 3)

    def _copy_bandwidth(self) -> float:
        """Bytes read and written per second."""
        source = torch.ones(2 << 30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._seconds(lambda: lambda: target.copy_(source), source.nbytes)

    def _bandwidth_share(self, name: str, call: Callable[[], Callable[[], object]], size: int) -> Figures:
        seconds = self._seconds(call, size)
        yield f"{name}: us", round(seconds * 1e6, 2)
        yield f"{name}: share of copy", round(size / seconds / self._bandwidth, 3)

    def _seconds(self, make_call: Callable[[], Callable[[], object]], size: int) -> float:
        """Of one call; `make_call` gives one with `size` bytes of its own, of which there are enough for no cache."""
        calls = [make_call() for _ in range(min(512, -(-CACHES // size)))] if size else [make_call()]
        graph = captured(partial(_run, calls), warm_up=partial(_run, calls[:2]))
        times = []
        for _ in range(self._replays + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[2:]) / len(calls)


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _rotary_call(tokens: int, heads: int) -> Callable[[], object]:
    q, k, v = (
        x.unflatten(1, (-1, 128)) for x in _random(tokens, (heads + 16) * 128).split([heads * 128, 1024, 1024], 1)
    )
    layer = KVLayer.zeros(-(-tokens // 16), 8, 16, 128, 128, dtype=DTYPE, device=DEVICE)
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
    slots, norms = torch.randperm(tokens, device=DEVICE), HeadNorms(_random(128), _random(128), 1e-6)
    rotary = Rotary(_random(4096, 128), _random(4096, 128))
    return lambda: rotate_and_write(q, k, v, positions, slots, rotary, layer, q, norms)


def _sampling_call(
    rows: int, scale: float, *, top_k: int = 0, top_p: float = 1.0, num_top: int = 0
) -> Callable[[], object]:
    logits = _random(rows, VOCAB_SIZE) * scale
    ones, seeds = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
    asked = SamplingRows(ones, seeds, seeds, torch.zeros(rows, dtype=torch.int32, device=DEVICE))
    workspace, stats = SamplingWorkspace.empty(rows, VOCAB_SIZE, DEVICE), RowStats.empty(rows, DEVICE)
    rules = Truncation(ones.double(), torch.full_like(seeds, top_k), ones.double() * top_p, ones.double() * 0)
    kept = KeptTokens(ones.double(), ones.clone(), seeds.clone())
    top_ids = torch.empty(rows, max(1, num_top), dtype=torch.int32, device=DEVICE)
    top_logprobs = torch.empty(top_ids.shape, device=DEVICE)

    def call() -> None:
        sample(logits, asked, workspace, stats)
        if top_k or top_p < 1:
            truncate(logits, asked, rules, workspace, stats, kept)
        if num_top:
            top_tokens(logits, ones, workspace, stats, top_ids, top_logprobs)

    return call


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


if __name__ == "__main__":
    main()
