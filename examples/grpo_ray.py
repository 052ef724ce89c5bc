"""GRPO on a fleet: two replicas sample the next batch while the trainer works on this one.

    python examples/grpo_ray.py                         two replicas on a Ray cluster of this machine
    python examples/grpo_ray.py --placement processes   the same without Ray
    python examples/grpo_ray.py --shuffle-advantages    the control: same run, rewards dealt to the wrong samples
    python examples/grpo_ray.py --verify                recomputes every log-prob under the weights that sampled it

`RolloutPolicy.collect` keeps the replicas busy: it returns 32 complete groups of 8 answers, and leaves 32 more in
flight. The trainer makes one step and pushes its weights, which both replicas take between two of their steps; answers
in flight go on under them and come with a later batch. No token is more than `--max-staleness` versions old when it is
trained on, and each has the log-prob of the version that sampled it, so its importance weight is exact.

The task and the made policy are those of examples/grpo.py, and imported from it.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_grpo import PastPolicies, ages, importance_weights
from grpo import GROUP_SIZE, NUM_PROMPTS, NUM_UNSEEN, Entry, Task, evaluate, make_items, make_policy
from rollout_engine import RolloutPolicy, SamplingParams, advantages, exact

EVALUATE_EVERY = 5


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    torch.set_num_threads(1)
    fleet = dict(num_replicas=options.replicas, placement=options.placement, num_threads=1)
    start = time.perf_counter()
    with RolloutPolicy.from_pretrained(str(options.model), dtype="float32", seed=options.seed, **fleet) as policy:
        print(
            f"{options.replicas} replicas ({options.placement}) after {time.perf_counter() - start:.1f} s", flush=True
        )
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
        history = list(train(policy, trainer, Task(policy.tokenizer), training, unseen, options))
    print(summary(history), f"; see {options.out}", sep="")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on reasoning-gym's spell_backward, over replicas.")
    parser.add_argument("--placement", choices=["ray", "processes"], default="ray", help="where the replicas run")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", help="directory of a policy made before; default: one made on the spot")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--max-staleness", type=int, default=1, help="versions a token may be old; 0: none is")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, default=4e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-advantages", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--verify", action="store_true", help="recompute log-probs under the weights of their versions")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_ray"))
    return parser.parse_args(arguments)


def train(
    policy: RolloutPolicy,
    trainer: nn.Module,
    task: Task,
    training: list[Entry],
    unseen: list[Entry],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Yield one row of metrics per step. A row's accuracy, now and then, is that before the step's update."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    collector = policy.collect(
        rows(task, training, random.Random(options.seed)),
        SamplingParams(max_tokens=task.max_tokens),
        num_samples=GROUP_SIZE,
        groups_per_batch=NUM_PROMPTS,
        max_staleness=options.max_staleness,
        reward_fn=task.reward,
        seed=options.seed,
    )
    past = PastPolicies(trainer, options.max_staleness) if options.verify else None
    start = began = time.perf_counter()
    with open(options.out / "metrics.jsonl", "w") as metrics, collector:
        for step, batch in zip(range(options.steps + 1), collector, strict=False):
            row = {"step": step, "waiting_seconds": time.perf_counter() - began}
            row |= {"reward": batch["next", "reward"].mean().item()} | ages(batch, policy.policy_version)
            row |= {"in_flight": collector.stats.num_running, "regenerated": collector.stats.num_regenerated}
            if past is not None:
                row["max_logprob_diff"] = past.largest_difference(batch)
            began = time.perf_counter()
            row["mean_weight"] = update(trainer, optimizer, batch, options.shuffle_advantages)
            row["training_seconds"] = time.perf_counter() - began
            if step % EVALUATE_EVERY == 0 or step == options.steps:
                row["accuracy"] = evaluate(policy, task, unseen)
            row["update_ms"] = 1000 * policy.update_weights(trainer).seconds
            if past is not None:
                past.keep(policy.policy_version, trainer)
            row["seconds"] = time.perf_counter() - start
            report(row)
            metrics.write(json.dumps(row) + "\n")
            yield row
            began = time.perf_counter()


def rows(task: Task, training: list[Entry], draws: random.Random) -> Iterator[dict[str, Any]]:
    """Yield one entry of the task after another, for ever: a prompt, and the column that its reward needs."""
    while True:
        entry = draws.choice(training)
        [prompt] = task.prompts([entry])
        yield (prompt if isinstance(prompt, dict) else {"prompt": prompt}) | {"entry": entry}


def update(trainer: nn.Module, optimizer: torch.optim.Optimizer, batch: TensorDict, shuffle: bool) -> float:
    """One GRPO step. Returns the mean importance weight of the batch's tokens."""
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    if shuffle:
        advantage = advantage[torch.randperm(len(advantage))]
    # Column i belongs to token i + 1.
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    new = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    weights = importance_weights(new[sampled], old[sampled])
    loss = -(weights * advantage.expand_as(new)[sampled] * new[sampled]).mean()
    loss.backward()
    clip_grad_norm_(trainer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return weights.mean().item()


def report(row: dict[str, Any]) -> None:
    """Print one step."""
    staleness = " ".join(f"{age}:{count}" for age, count in row["staleness"].items())
    difference = f"  max |log-prob diff| {row['max_logprob_diff']}" if "max_logprob_diff" in row else ""
    print(
        f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row.get('accuracy', math.nan):.3f}  "
        f"tokens by age {staleness}  mixed {row['mixed']:.0%}  in flight {row['in_flight']}  "
        f"waited {row['waiting_seconds']:.2f} s  update {row['update_ms']:.0f} ms{difference}",
        flush=True,
    )


def summary(history: list[dict[str, Any]]) -> str:
    """What the whole run was like."""
    last = history[-1]
    parts = {name: sum(row[f"{name}_seconds"] for row in history) for name in ("training", "waiting")}
    shares = ", ".join(f"{name} {seconds / last['seconds']:.0%}" for name, seconds in parts.items())
    first = f"accuracy on {NUM_UNSEEN} unseen words: {history[0]['accuracy']:.3f} -> {last['accuracy']:.3f}"
    return f"{last['seconds']:.0f} s: {shares}; {last['regenerated']} groups regenerated\n{first}"


if __name__ == "__main__":
    main()
