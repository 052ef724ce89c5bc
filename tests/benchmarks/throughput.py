"""Tokens per second of one work, engines taking turns; ratios are within a round."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from prompts import FreshPrompts
from workers import Worker

from rollout_engine.cli.ceilings import Ceilings, Work

OURS = "ours"
_LONG_SECONDS = 60.0
"""A peer whose round takes longer than this is measured once."""
_PAUSE_SECONDS = 0.3
"""Between turns: threads of the engine that was just busy still spin for a moment."""


def measure(workers: dict[str, Worker], work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Median tokens per second of each engine, ours over each peer's, and the share of this run's ceilings.

    The first run of each does not count: memory that no request has touched yet costs page faults.
    """
    for worker in workers.values():
        _run(worker, work, prompts)
    rates: dict[str, list[float]] = {name: [] for name in workers}
    for name, worker in _turns(workers, rates, work, rounds):
        time.sleep(_PAUSE_SECONDS)
        rates[name].append(work.num_tokens / _run(worker, work, prompts))
    limits = Ceilings(**workers[OURS].ask("ceilings", work=work)["answer"])
    ours = statistics.median(rates[OURS])
    return {
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        **{f"ratio_to_{name}": _ratio(rates[OURS], values) for name, values in rates.items() if name != OURS},
        **limits._asdict(),
        **limits.shares(ours),
        "rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
    }


def _turns(
    workers: dict[str, Worker], rates: dict[str, list[float]], work: Work, rounds: int
) -> Iterator[tuple[str, Worker]]:
    """Who runs next: everybody once a round, in the opposite order in every other round."""
    for i in range(rounds):
        for name in [*workers] if i % 2 == 0 else [*workers][::-1]:
            took = work.num_tokens / rates[name][0] if rates[name] else 0.0
            if name == OURS or took < _LONG_SECONDS:
                yield name, workers[name]


def _run(worker: Worker, work: Work, prompts: FreshPrompts) -> float:
    reply = worker.ask(
        "run",
        prompts=prompts.draw(work.num_prompts, work.num_prompt_tokens),
        num_samples=work.num_samples,
        num_sampled=work.num_sampled_tokens,
    )
    if reply["answer"] != work.num_tokens:
        raise AssertionError(f"{worker.engine} sampled {reply['answer']} tokens, not {work.num_tokens}")
    return reply["seconds"]


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=False)), 3)
