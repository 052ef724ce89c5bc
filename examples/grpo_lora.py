"""GRPO of a LoRA adapter: the base stays frozen, and the engine serves both, the base as the reference.

    pip install "rollout-engine[examples]" peft
    python examples/grpo_lora.py                       the task and the made policy of examples/grpo.py

Each step: the engine samples under the adapter and scores the same tokens under the base, the trainer takes one step
on `A` and `B` alone, and only these go back into the engine. Trainer and engine compute the adapter by the same
product, so the last column says 0.0; the one before is the KL divergence from the base, an estimate per token (k3 of
Schulman, http://joschu.net/blog/kl-approx.html).
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo import GROUP_SIZE, NUM_PROMPTS, NUM_UNSEEN, Entry, Task, grpo_loss, make_items, make_policy
from rollout_engine import RolloutPolicy, SamplingParams, advantages, exact

ADAPTER = "default"
"""The name that PEFT gives an adapter by itself."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the example; returns one row of metrics per step."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    trainer = exact.enable(get_peft_model(base, config))
    with RolloutPolicy.from_pretrained(str(options.model), dtype="float32", max_lora_rank=options.rank) as policy:
        policy.update_weights(trainer, merge=False)
        history = list(train(policy, trainer, Task(policy.tokenizer), training, unseen, options))
    first, last = history[0]["accuracy"], history[-1]["accuracy"]
    print(f"accuracy on {NUM_UNSEEN} unseen words: {first:.3f} -> {last:.3f}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="GRPO of LoRA adapters on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="checkpoint directory or hub id; default: a small policy made on the spot")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--kl", type=float, default=0.01, help="weight of the KL divergence from the base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-advantages", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_lora"))
    return parser.parse_args(arguments)


def train(
    policy: RolloutPolicy,
    trainer: nn.Module,
    task: Task,
    training: list[Entry],
    unseen: list[Entry],
    options: argparse.Namespace,
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step. A row's accuracy is that of the policy before the step's update."""
    trained = [parameter for parameter in trainer.parameters() if parameter.requires_grad]  # A and B
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    draws = random.Random(options.seed)
    for step in range(options.steps + 1):
        accuracy = rollout(policy, task, unseen, 1, temperature=0.0)["next", "reward"].mean().item()
        batch = rollout(policy, task, draws.sample(training, NUM_PROMPTS), GROUP_SIZE, seed=draws.getrandbits(63))
        reference = policy.score(batch)  # the base: no adapter is named
        divergence, difference = update(trainer, trained, optimizer, batch, reference, options)
        report = policy.update_weights(trainer, merge=False)
        row = {
            "step": step,
            "reward": batch["next", "reward"].mean().item(),
            "accuracy": accuracy,
            "update_ms": 1000 * report.seconds,
            "kl": divergence,
            "max_logprob_diff": difference,
        }
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        yield row


def rollout(
    policy: RolloutPolicy,
    task: Task,
    entries: list[Entry],
    num_samples: int,
    seed: int = 0,
    temperature: float = 1.0,
    adapter: str = ADAPTER,
) -> Any:
    """Answers to `entries` under an adapter, with their rewards."""
    return policy.rollout(
        task.prompts(entries),
        SamplingParams(temperature=temperature, max_tokens=task.max_tokens),
        num_samples=num_samples,
        columns={"entry": entries},
        reward_fn=task.reward,
        seed=seed,
        lora_request=adapter,
        use_tqdm=False,
    )


def update(
    trainer: nn.Module,
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batch: Any,
    reference: Tensor,
    options: argparse.Namespace,
) -> tuple[float, float]:
    """One GRPO step. Returns the KL divergence from the base, and the largest |log-prob difference| to the engine."""
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    if options.shuffle_advantages:
        advantage = advantage[torch.randperm(len(advantage))]
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    old = batch["log_probs", "full"][:, 1:][sampled]
    logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    new = logprobs[sampled]
    apart = reference[:, 1:][sampled] - new
    divergence = (apart.exp() - apart - 1).mean()
    loss = grpo_loss(new, old, advantage.expand_as(logprobs)[sampled]) / sampled.sum() + options.kl * divergence
    loss.backward()
    clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return divergence.item(), (new - old).abs().max().item()


if __name__ == "__main__":
    main()
