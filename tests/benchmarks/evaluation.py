"""An evaluation sweep on S beside the same requests given to `LLM.generate`: checkpoints x two settings x prompts x 8.

    python tests/benchmarks/evaluation.py --prompts 500 --checkpoints 3 --rounds 2

Both load each checkpoint, sample with the same seeds, and take turns. The ratios are of CPU time, and of time by the
clock: generate / evaluate, so below 1 where the sweep takes longer. The ledger is on disk.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from works import MAX_MODEL_LEN, SHAPES

from rollout_engine import LLM, EvalTask, RolloutPolicy, SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.rollouts.evaluation.sweep import seed_of
from rollout_engine.testing import tiny_checkpoint

NUM_SAMPLES = 8
SETTINGS = {"hot": {"temperature": 1.0}, "cool": {"temperature": 0.7}}


def is_long(completions: list[str]) -> list[float]:
    return [float(len(text) > 60) for text in completions]


def measure(directory: Path, num_prompts: int, num_checkpoints: int, max_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of rounds in which the two take turns; the first warms up."""
    shape = {name: value for name, value in SHAPES["S"].items() if name not in ("dtype", "vocab_size")}
    paths = [
        tiny_checkpoint(directory / str(i), max_position_embeddings=MAX_MODEL_LEN, **shape)
        for i in range(num_checkpoints)
    ]
    prompts = [
        f"Question {i}: what is {i} plus {i * 7 % 101}, and why is it not {i * 3 % 17}?" for i in range(num_prompts)
    ]
    settings = {name: {**each, "max_tokens": max_tokens, "ignore_eos": True} for name, each in SETTINGS.items()}
    task = EvalTask(name="long", rows=prompts, reward_fn=is_long)
    requests = [
        SamplingParams(**setting, n=NUM_SAMPLES, logprobs=0, seed=mix(seed_of(0, "long", name), i))
        for name, setting in settings.items()
        for i in range(num_prompts)
    ]
    cpu, clock = [], []
    with RolloutPolicy.from_pretrained(
        paths[0], dtype="float32", max_model_len=MAX_MODEL_LEN, log_stats=False
    ) as policy:
        llm = LLM.from_engine(policy.engine)

        def generate() -> int:
            tokens = 0
            for path in paths:
                policy.update_weights(path)
                outputs = llm.generate(prompts * len(settings), requests, use_tqdm=False)
                tokens += sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
            return tokens

        def evaluate() -> int:
            sweep = {"settings": settings, "checkpoints": {str(i): path for i, path in enumerate(paths)}}
            shutil.rmtree(directory / "out", ignore_errors=True)
            report = policy.evaluate(task, sweep=sweep, num_samples=NUM_SAMPLES, out=directory / "out", use_tqdm=False)
            return sum(len(sample["response_token_ids"]) for sample in report.samples)

        for index in range(rounds + 1):
            one, other = _timed(generate), _timed(evaluate)
            assert one["tokens"] == other["tokens"]
            if index:
                cpu.append(one["cpu"] / other["cpu"])
                clock.append(one["clock"] / other["clock"])
    return {
        "num_samples": num_checkpoints * len(settings) * num_prompts * NUM_SAMPLES,
        "num_tokens": one["tokens"],
        "cpu_ratio": round(statistics.median(cpu), 3),
        "clock_ratio": round(statistics.median(clock), 3),
        "cpu_ratios": [round(ratio, 3) for ratio in cpu],
        "clock_ratios": [round(ratio, 3) for ratio in clock],
    }


def _timed(work: Any) -> dict[str, float]:
    start, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return {"clock": time.perf_counter() - start, "cpu": time.process_time() - cpu, "tokens": tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), given.prompts, given.checkpoints, given.max_tokens, given.rounds)))
