"""What a setting costs: the share of throughput lost with it, two runs of the same work taking turns."""

import statistics
from typing import Any

from prompts import FreshPrompts
from workers import Worker

from rollout_engine.cli.ceilings import Work

_STEPS_BETWEEN = 64


def of_logprobs(ours: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Log-probs of the sampled tokens, on against off."""
    return _cost(ours, work, prompts, rounds, without={"logprobs": False}, with_={"logprobs": True})


def of_top_p(ours: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """top_p=0.95 against the full distribution, log-probs on in both."""
    return _cost(ours, work, prompts, rounds, without={}, with_={"top_p": 0.95})


def of_updates(ours: Worker, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """New weights after every 64 steps: the share of time that the updates take, while nothing else is computed.

    The same thread steps and updates, so that is what throughput loses; two runs taking turns would say it with more
    noise than there is cost.
    """
    ours.ask("make_trainer")
    runs = []
    for _ in range(rounds + 1):  # the first warms up
        reply = ours.ask(
            "run_with_updates",
            prompts=prompts.draw(work.num_prompts, work.num_prompt_tokens),
            num_samples=work.num_samples,
            num_sampled=work.num_sampled_tokens,
            steps_between=_STEPS_BETWEEN,
        )
        runs.append(reply["answer"])
    costs = [update / (update + _STEPS_BETWEEN * run["step"]) for run in runs[1:] for update in run["updates"]]
    return {
        "cost": round(statistics.median(costs), 4),
        "updates": [round(cost, 4) for cost in costs],
        "update_ms": round(1000 * statistics.median(s for run in runs[1:] for s in run["updates"]), 1),
        "stall_ms": round(1000 * statistics.median(s for run in runs[1:] for s in run["stalls"]), 2),
        "step_ms": round(1000 * statistics.median(run["step"] for run in runs[1:]), 2),
        "first_update_ms": round(1000 * runs[0]["updates"][0], 1),
    }


def _cost(
    ours: Worker,
    work: Work,
    prompts: FreshPrompts,
    rounds: int,
    *,
    without: dict[str, Any],
    with_: dict[str, Any],
) -> dict[str, Any]:
    """`cost` is 1 - rate with / rate without, the median over rounds; the first of them warms up."""
    costs, rates = [], {"without": 0.0, "with": 0.0}
    for i in range(rounds + 1):
        settings = {"without": without, "with": with_}
        for name in ("without", "with") if i % 2 == 0 else ("with", "without"):
            reply = ours.ask(
                "run",
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
