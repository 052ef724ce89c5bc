"""What a core in a process of its own costs, and how soon its clients are served or told."""

import statistics
from typing import Any

from prompts import FreshPrompts
from workers import Worker

from rollout_engine.cli.ceilings import Work

NUM_STREAMS = 256


def throughput(ours: Worker, own_process: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """`ratio`: tokens per second of `AsyncLLM` / of `LLM`, the median over rounds that take turns."""
    rates: dict[str, list[float]] = {"in_process": [], "own_process": []}
    for i in range(rounds + 1):  # the first warms up
        turns = [("in_process", ours), ("own_process", own_process)]
        for name, worker in turns if i % 2 else turns[::-1]:
            reply = worker.ask(
                "run",
                prompts=prompts.draw(work.num_prompts, work.num_prompt_tokens),
                num_samples=work.num_samples,
                num_sampled=work.num_sampled_tokens,
            )
            rates[name].append(reply["answer"] / reply["seconds"])
    ratios = [b / a for a, b in zip(rates["in_process"][1:], rates["own_process"][1:], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "tokens_per_second": {name: round(statistics.median(values[1:]), 1) for name, values in rates.items()},
    }


def streams(own_process: Worker, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """How late the event loop is, milliseconds, while 256 requests stream."""
    late: list[float] = []
    for i in range(rounds + 1):
        reply = own_process.ask("gaps", prompts=prompts.draw(NUM_STREAMS, 16), num_sampled=64)
        late += reply["answer"] if i else []
    late.sort()
    return {"p50_ms": _at(late, 0.5), "p99_ms": _at(late, 0.99), "max_ms": round(late[-1], 2), "ticks": len(late)}


def pauses(worker: Worker, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """What a pause with "keep" takes beyond the time of the step it came in, milliseconds, while 64 requests run.

    `worker`: an engine in a process of its own, or one in process that another thread steps.
    """
    pairs = [
        pair
        for _ in range(rounds)
        for pair in worker.ask("pauses", prompts=prompts.draw(64, 16), num_pauses=8)["answer"]
    ]
    beyond = sorted(took - step for took, step in pairs)
    return {
        "step_ms": round(statistics.median(step for _, step in pairs), 2),
        "p50_ms": round(statistics.median(took for took, _ in pairs), 2),
        "max_ms": round(max(took for took, _ in pairs), 2),
        "beyond_step_p90_ms": _at(beyond, 0.9),
        "beyond_step_max_ms": round(beyond[-1], 2),
        "pauses": len(pairs),
    }


def kills(own_process: Worker, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Milliseconds until every one of 64 open requests knows that its core was killed."""
    told = [own_process.ask("kill", prompts=prompts.draw(64, 16))["answer"] for _ in range(rounds)]
    return {"max_ms": round(max(told), 1), "runs": [round(ms, 1) for ms in told]}


def _at(values: list[float], share: float) -> float:
    return round(values[int(share * len(values))], 2)
