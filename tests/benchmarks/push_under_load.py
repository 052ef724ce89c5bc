"""What a push of new weights costs requests that run meanwhile: the engine in one process, the trainer in another.

python tests/benchmarks/push_under_load.py [--transport shm] [--shape M] [--rounds 5]

64 sequences decode 64 steps, with one push in their midst or without, taking turns. `throughput_ratio` is with over
without; `stall_ms` is the longest gap between two outputs of a request while the push goes on, less the median gap
without, and `stall_beyond_step_ms` what of that is more than one step. Median over rounds: a virtual machine may stand
still for a tenth of a second every few seconds, push or none, as `longest_gap_without_ms` shows.
"""

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import torch
from prompts import FreshPrompts
from transformers import AutoConfig, AutoModelForCausalLM
from works import MAX_MODEL_LEN, SHAPES, write_config

from rollout_engine import AsyncLLM, SamplingParams

_STEPS, _PUSH_AT = 64, 16
_NUM_PROMPTS, _NUM_SAMPLES, _NUM_PROMPT_TOKENS = 8, 8, 64


class Run:
    """One batch of requests; when each output came."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.times: list[list[float]] = []
        self.reached = asyncio.Event()

    async def go(self, prompts: list[list[int]]) -> None:
        params = SamplingParams(
            n=_NUM_SAMPLES, max_tokens=1 + _STEPS, ignore_eos=True, detokenize=False, output_kind="delta"
        )
        await asyncio.gather(*(self._one(prompt, params) for prompt in prompts))

    async def _one(self, prompt: list[int], params: SamplingParams) -> None:
        times: list[float] = []
        self.times.append(times)
        async for _ in self._engine.generate(prompt, params):
            times.append(time.perf_counter())
            if len(times) == _PUSH_AT:
                self.reached.set()

    def gaps(self, start: float = -math.inf, end: float = math.inf) -> list[float]:
        """Between outputs once all prompts are computed, where they overlap the time from `start` to `end`.

        A step that computes prompts is longer, push or none.
        """
        decoding = [times[_PUSH_AT // 2 :] for times in self.times]
        pairs = (pair for times in decoding for pair in zip(times, times[1:], strict=False))
        return [b - a for a, b in pairs if a < end and b > start]

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.times) - max(times[0] for times in self.times)


async def measure(
    engine: AsyncLLM, trainer: torch.nn.Module, shape: str, transport: str, rounds: int
) -> dict[str, Any]:
    """The figure, the first round left out."""
    fresh = FreshPrompts(SHAPES[shape]["vocab_size"])
    rows = []
    for _ in range(rounds + 1):
        row: dict[str, Any] = {}
        for kind in ("without", "with"):
            run = Run(engine)
            running = asyncio.create_task(run.go(fresh.draw(_NUM_PROMPTS, _NUM_PROMPT_TOKENS)))
            await run.reached.wait()
            if kind == "with":
                start = time.perf_counter()
                report = await engine.update_weights(trainer, transport=transport)
                assert report.num_in_flight == _NUM_PROMPTS, "the push came too late"
                row["pushing"] = start, time.perf_counter()
                row |= {"push": report.seconds, "commit": report.stall_seconds, "bytes": report.num_bytes}
            await running
            row[kind] = run
        rows.append(row)
    rows = rows[1:]
    step = statistics.median(gap for row in rows for gap in row["without"].gaps())
    longest = [max(row["with"].gaps(*row["pushing"])) for row in rows]
    stall = statistics.median(longest) - step
    return {
        "throughput_ratio": round(statistics.median(row["without"].seconds / row["with"].seconds for row in rows), 3),
        "stall_ms": round(1000 * stall, 1),
        "stall_beyond_step_ms": round(1000 * (stall - step), 1),
        "step_ms": round(1000 * step, 2),
        "longest_gap_ms": [round(1000 * gap, 1) for gap in longest],
        "longest_gap_without_ms": [round(1000 * max(row["without"].gaps()), 1) for row in rows],
        "push_ms": round(1000 * statistics.median(row["push"] for row in rows), 1),
        "commit_ms": round(1000 * statistics.median(row["commit"] for row in rows), 2),
        "megabytes": round(rows[0]["bytes"] / 1e6, 1),
        "rounds": rounds,
    }


def main() -> None:
    """See the file's first lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--shape", default="M", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=results.HERE / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_config(Path(folder), arguments.shape)
        config = AutoConfig.from_pretrained(directory)
        dtype = getattr(torch, SHAPES[arguments.shape]["dtype"])
        trainer = AutoModelForCausalLM.from_config(config, dtype=dtype)
        options = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
        with AsyncLLM(directory, **options) as engine:
            figure = asyncio.run(measure(engine, trainer, arguments.shape, arguments.transport, arguments.rounds))
    name = f"push under load by {arguments.transport}, {arguments.shape}"
    print(name, json.dumps(figure, indent=1), flush=True)
    command = f"push_under_load.py --transport {arguments.transport} --rounds {arguments.rounds}"
    results.save(arguments.results, name, figure, {}, command)


if __name__ == "__main__":
    main()
