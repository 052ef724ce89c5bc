"""What a setting costs: the share of throughput lost with it, two runs of the same work taking turns."""

import statistics
from typing import Any

from prompts import FreshPrompts
from workers import Worker

from rollout_engine.cli.ceilings import Work


def of_logprobs(ours: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Log-probs of the sampled tokens, on against off."""
    return _cost(ours, work, prompts, rounds, without={"logprobs": False}, with_={"logprobs": True})


def of_top_p(ours: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """top_p=0.95 against the full distribution, log-probs on in both."""
    return _cost(ours, work, prompts, rounds, without={}, with_={"top_p": 0.95})


def of_updates(ours: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """New weights after every 64 steps against none."""
    ours.ask("make_trainer")
    result = _cost(
        ours,
        work,
        prompts,
        rounds,
        method="run_with_updates",
        without={"steps_between": 1 << 30},
        with_={"steps_between": 64},
    )
    return result | {"updates_per_run": work.num_sampled_tokens // 64}


def _cost(
    ours: Worker,
    work: Work,
    prompts: FreshPrompts,
    rounds: int,
    *,
    without: dict[str, Any],
    with_: dict[str, Any],
    method: str = "run",
) -> dict[str, Any]:
    """`cost` is 1 - rate with / rate without, the median over rounds; the first of them warms up."""
    costs, rates = [], {"without": 0.0, "with": 0.0}
    for i in range(rounds + 1):
        settings = {"without": without, "with": with_}
        for name in ("without", "with") if i % 2 == 0 else ("with", "without"):
            reply = ours.ask(
                method,
                prompts=prompts.draw(work.num_prompts, work.num_prompt_tokens),
                num_samples=work.num_samples,
                num_sampled=work.num_sampled_tokens,
                **settings[name],
            )
            rates[name] = work.num_tokens / reply["seconds"]
        if i:
            costs.append(1 - rates["with"] / rates["without"])
    return {
        "cost": round(statistics.median(costs), 4),
        "rounds": [round(cost, 4) for cost in costs],
        "tokens_per_second": round(rates["without"], 1),
    }
