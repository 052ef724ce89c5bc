"""One layer of multi-head latent attention on the CPU: latents in the KV pool, against expanded keys and values.

    python tests/benchmarks/latents.py --threads 1 --json

Heads of DeepSeek-V2-Lite (16) and of DeepSeek-V3 (128), with 128 + 64 channels of a key, 128 of a value and latents of
512; bfloat16, blocks of 16. Both ways begin with the latents and queries of new tokens, and end with values of heads:
expanded, the latents are multiplied, and attended to as any keys and values; else queries are multiplied before
attention, and its results after it. Ways alternate; the best of several rounds counts. Latents may lose in long
prompts: attention then multiplies 1,088 numbers for each query, head and position, and 320 if expanded.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rollout_engine.cli import machine
from rollout_engine.kernels import latent, linear
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.cpu.attention import CompiledPool
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.modules.geometry import LayerGeometry

NOPE, ROPE, VALUE, RANK, BLOCK_SIZE = 128, 64, 128, 512, 16
DTYPE = torch.bfloat16
PARAMS = AttentionParams((NOPE + ROPE) ** -0.5)
_MOST_SECONDS = 15.0
"""Time after which no further round of a case begins."""


class Case(NamedTuple):
    """Sequences that compute some tokens each."""

    num_heads: int
    num_sequences: int
    context: int
    """Tokens of each that are cached."""
    num_new: int = 1

    @property
    def name(self) -> str:
        kind = "decode" if self.num_new == 1 else f"{self.num_new:,} new of"
        return f"{self.num_heads} heads, {kind} {self.num_sequences} x {self.context + self.num_new:,}"

    def chunks(self) -> tuple[list[SequenceChunk], int]:
        """The step, and its number of blocks."""
        size = -(-(self.context + self.num_new) // BLOCK_SIZE)
        tables = torch.randperm(size * self.num_sequences).view(self.num_sequences, size).tolist()
        new = [0] * self.num_new
        return [SequenceChunk(new, self.context, table) for table in tables], size * self.num_sequences


CASES = (
    Case(16, 8, 1023),
    Case(16, 1, 4095),
    Case(128, 1, 2047),
    Case(16, 1, 0, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args.rounds)
    if args.json:
        print(json.dumps({"machine": machine.describe(), "threads": args.threads} | result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:56} {value}")


def measure(rounds: int) -> dict[str, float]:
    """Bytes of a token and layer, and times the speed of the expanded form, by case."""
    result: dict[str, float] = {}
    for case in CASES:
        per_token, runs = zip(*(way(case) for way in (expanded, as_latents, in_place)), strict=True)
        wide, latents, plain = _best_of(runs, rounds)
        result[f"{case.num_heads} heads: bytes a token and layer, expanded"] = per_token[0]
        result[f"{case.num_heads} heads: bytes a token and layer"] = per_token[1]
        result[f"{case.name}: milliseconds, expanded"] = round(wide * 1e3, 3)
        result[f"{case.name}: milliseconds, plain weights"] = round(plain * 1e3, 3)
        result[f"{case.name}: milliseconds"] = round(latents * 1e3, 3)
        result[f"{case.name}: tokens a second"] = round(case.num_sequences * case.num_new / latents)
        result[f"{case.name}: times the expanded speed"] = round(wide / latents, 2)
    return result


def _best_of(runs: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The least seconds of each way; the first round warms up."""
    least, end = [math.inf] * len(runs), time.monotonic() + _MOST_SECONDS
    for i in range(rounds + 1):
        seconds = [run() for run in runs]
        if i:
            least = list(map(min, least, seconds))
        if i and time.monotonic() > end:
            break
    return least


def expanded(case: Case) -> tuple[int, Callable[[], float]]:
    """Bytes of a token, and a function that computes the layer's step and returns its seconds."""
    geometry = _geometry(
        num_heads=case.num_heads, num_kv_heads=case.num_heads, head_dim_k=NOPE + ROPE, head_dim_v=VALUE
    )
    pool, batch, (query, latents, rotated), weight = _made(case, geometry)
    plan = linear.plan_for(weight.flatten(0, 1))
    operand = linear.pack(weight.flatten(0, 1), plan)

    def run() -> None:
        product = linear.matmul(latents, operand, None, plan).unflatten(1, (case.num_heads, -1))
        keys = torch.cat((product[..., :NOPE], rotated[:, None].expand(-1, case.num_heads, -1)), -1)
        pool.step(batch).attend(0, query, keys, product[..., NOPE:], PARAMS)

    return geometry.cached_per_token * DTYPE.itemsize, lambda: _seconds_of(run)


def as_latents(case: Case) -> tuple[int, Callable[[], float]]:
    """The same over latents, by packed weights."""
    return _over_latents(case, is_packed=True)


def in_place(case: Case) -> tuple[int, Callable[[], float]]:
    """The same over latents, by the plain weight."""
    return _over_latents(case, is_packed=False)


def _over_latents(case: Case, *, is_packed: bool) -> tuple[int, Callable[[], float]]:
    sizes = dict(num_heads=case.num_heads, num_kv_heads=1, head_dim_k=RANK + ROPE, head_dim_v=RANK)
    geometry = _geometry(**sizes, has_latents=True)
    pool, batch, (query, latents, rotated), weight = _made(case, geometry)
    before = after = None
    if is_packed:
        before = latent.absorb_packed(gemm.pack(weight[:, :NOPE].mT.flatten(0, 1)))
        after = latent.expand_packed(gemm.pack(weight[:, NOPE:].flatten(0, 1)))

    def run() -> None:
        keys = torch.cat((latents, rotated), -1)[:, None]
        absorbed = latent.absorb(query, weight, NOPE, before)
        mixed = pool.step(batch).attend(0, absorbed, keys, keys[..., :RANK], PARAMS)
        latent.expand(mixed, weight, NOPE, after)

    return geometry.cached_per_token * DTYPE.itemsize, lambda: _seconds_of(run)


def _geometry(**fields: int) -> LayerGeometry:
    return LayerGeometry(**fields, scale=PARAMS.scale, sliding_window=None, softcap=None, has_sinks=False)


def _made(
    case: Case, geometry: LayerGeometry
) -> tuple[CompiledPool, FlatBatch, tuple[torch.Tensor, ...], torch.Tensor]:
    """A pool that is filled, the step, its queries, latents and rotated keys, and the weight."""
    chunks, num_blocks = case.chunks()
    pool = CompiledPool([geometry], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=DTYPE)
    for tensor in pool.tensors():
        tensor.fill_(0.5)
    num_tokens = case.num_sequences * case.num_new
    shapes = (num_tokens, case.num_heads, NOPE + ROPE), (num_tokens, RANK), (num_tokens, ROPE)
    weight = (torch.randn(case.num_heads, NOPE + VALUE, RANK) / RANK**0.5).to(DTYPE)
    return pool, FlatBatch.of(chunks), tuple(torch.randn(shape).to(DTYPE) for shape in shapes), weight


def _seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the work; of one thread those that it computed, which other programs on the machine change less."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


if __name__ == "__main__":
    main()
