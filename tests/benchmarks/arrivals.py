"""Requests that arrive at random, read token by token: this engine's `AsyncLLM` beside a peer's."""

import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prompts import FreshPrompts
from workers import Worker

from rollout_engine.cli.ceilings import Dimensions, products_seconds
from rollout_engine.model.loading.loader import find_geometry

NUM_REQUESTS = 200


class Mix(NamedTuple):
    """How long requests are: drawn evenly between two lengths, both included."""

    prompt_tokens: tuple[int, int]
    sampled_tokens: tuple[int, int]

    @property
    def means(self) -> tuple[float, float]:
        """Of prompts and of what is sampled."""
        return statistics.mean(self.prompt_tokens), statistics.mean(self.sampled_tokens)


MIXES = {"": Mix((64, 256), (32, 128)), " of rollouts": Mix((32, 128), (64, 256))}
"""Twice as many prompt tokens as sampled ones, most of the work products that all engines do alike; and the other way
round, as those of a trainer are. By what a figure's name says of them."""
_LOAD = 0.7
"""Of what the slowest engine can do when all requests are there at once: none of them falls behind."""
_OURS = "async"
_ROWS = 256
"""Of a product at full speed."""
_PAUSE_SECONDS = 0.5
"""Between turns: threads of the engine that was just busy still spin for a moment."""


def measure(workers: dict[str, Worker], prompts: FreshPrompts, mix: Mix, rounds: int) -> dict[str, Any]:
    """Throughput with all requests at once, then what a request sees when they come as a Poisson process.

    An engine that keeps up with its arrivals is as fast as they are: its own throughput shows only where there are more
    of them than it can serve, and most where all are there. Every engine gets the same lengths at the same times.
    Milliseconds to the first token and between outputs, over all rounds; ratios are this engine over the peer, so below
    1 is better for times.
    """
    rates: dict[str, list[float]] = {name: [] for name in workers}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for worker in workers.values():  # as many as measured: memory that no request has touched yet costs page faults
        _stream(worker, _requests(prompts, mix, rounds, rate=1e9))
    for name, i in _turns(workers, rounds):
        result = _stream(workers[name], _requests(prompts, mix, i, rate=1e9))
        rates[name].append(result["tokens"] / result["seconds"])
    offered = _LOAD * min(statistics.median(values) for values in rates.values())
    for name, i in _turns(workers, rounds):
        rate = offered / mix.means[1]
        seen[name].append(_stream(workers[name], _requests(prompts, mix, i, rate)))
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


def by_products(directory: Path, dtype: torch.dtype, mix: Mix) -> float:
    """Tokens per second of such requests, all at once, were there nothing but the products of their tokens."""
    dims = Dimensions.of(*find_geometry(str(directory), dtype), dtype)
    layers = products_seconds(dims.layers, _ROWS, dtype) / _ROWS
    head = products_seconds([dims.head], _ROWS, dtype) / _ROWS
    prompt, sampled = mix.means
    return round(sampled / ((prompt + sampled - 1) * layers + sampled * head), 1)


def _turns(workers: dict[str, Worker], rounds: int) -> list[tuple[str, int]]:
    """(who, round): everybody once a round, in the opposite order in every other round."""
    names = [*workers]
    return [(name, i) for i in range(rounds) for name in (names if i % 2 == 0 else names[::-1])]


def _requests(prompts: FreshPrompts, mix: Mix, seed: int, rate: float) -> list[dict[str, Any]]:
    """`rate`: requests per second. Lengths and, but for their scale, times depend on the seed alone."""
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(NUM_REQUESTS):
        (prompt,) = prompts.draw(1, rng.randint(*mix.prompt_tokens))
        requests.append({"prompt": prompt, "num_sampled": rng.randint(*mix.sampled_tokens), "at": at})
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
