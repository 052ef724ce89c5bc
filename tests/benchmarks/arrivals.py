"""Requests that arrive at random, read token by token: this engine's `AsyncLLM` beside a peer's."""

import random
import statistics
import time
from typing import Any

from prompts import FreshPrompts
from workers import Worker

NUM_REQUESTS = 200
_PROMPT_TOKENS = (64, 256)
_SAMPLED_TOKENS = (32, 128)
_LOAD = 0.7
"""Of what this engine can do when all requests are there at once."""
_OURS = "async"
_PAUSE_SECONDS = 0.5
"""Between turns: threads of the engine that was just busy still spin for a moment."""


def measure(workers: dict[str, Worker], prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Throughput with all requests at once, then what a request sees when they come as a Poisson process.

    Every engine gets the same lengths at the same times. Milliseconds to the first token and between outputs, over all
    rounds; ratios are this engine over the peer, so below 1 is better for times.
    """
    rates: dict[str, list[float]] = {name: [] for name in workers}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for worker in workers.values():
        _stream(worker, _requests(prompts, 0, rate=1e9)[:32])
    for name, i in _turns(workers, rounds):
        result = _stream(workers[name], _requests(prompts, i, rate=1e9))
        rates[name].append(result["tokens"] / result["seconds"])
    offered = _LOAD * statistics.median(rates[_OURS])
    for name, i in _turns(workers, rounds):
        rate = offered / statistics.mean(_SAMPLED_TOKENS)
        seen[name].append(_stream(workers[name], _requests(prompts, i, rate)))
    figures = {name: _summary(results) for name, results in seen.items()}
    throughput = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    peers = [name for name in workers if name != _OURS]
    return {
        "tokens_per_second": throughput,
        "rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        "offered_tokens_per_second": round(offered, 1),
        "arriving": figures,
        **{f"throughput_ratio_to_{name}": round(throughput[_OURS] / throughput[name], 3) for name in peers},
        **{
            f"{key[:-7]}_ratio_to_{name}": round(figures[_OURS][key] / figures[name][key], 3)
            for name in peers
            for key in ("first_p50_ms", "gap_p50_ms")
        },
    }


def _turns(workers: dict[str, Worker], rounds: int) -> list[tuple[str, int]]:
    """(who, round): everybody once a round, in the opposite order in every other round."""
    names = [*workers]
    return [(name, i) for i in range(rounds) for name in (names if i % 2 == 0 else names[::-1])]


def _requests(prompts: FreshPrompts, seed: int, rate: float) -> list[dict[str, Any]]:
    """`rate`: requests per second. Lengths and, but for their scale, times depend on the seed alone."""
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(NUM_REQUESTS):
        (prompt,) = prompts.draw(1, rng.randint(*_PROMPT_TOKENS))
        requests.append({"prompt": prompt, "num_sampled": rng.randint(*_SAMPLED_TOKENS), "at": at})
        at += rng.expovariate(1.0) / rate
    return requests


def _stream(worker: Worker, requests: list[dict[str, Any]]) -> dict[str, Any]:
    time.sleep(_PAUSE_SECONDS)
    return worker.ask("stream", requests=requests)["answer"]


def _summary(results: list[dict[str, Any]]) -> dict[str, float]:
    summary = {}
    for name, key in (("first", "first"), ("gap", "gaps")):
        values = sorted(value for result in results for value in result[key])
        summary |= {f"{name}_p50_ms": _at(values, 0.5), f"{name}_p99_ms": _at(values, 0.99)}
    rates = [result["tokens"] / result["seconds"] for result in results]
    return summary | {"tokens_per_second": round(statistics.median(rates), 1)}


def _at(values: list[float], share: float) -> float:
    return round(values[int(share * len(values))], 2)
