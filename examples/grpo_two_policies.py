"""Two policies on one base, each a LoRA adapter, train against each other's frozen copy in one engine.

    pip install "rollout-engine[examples]" peft
    python examples/grpo_two_policies.py               the task, the made policy and the options of grpo_lora.py

A right answer earns 1, and up to a half more the likelier it is under the policy that gave it than under its rival's
frozen copy: who is right has to be surer than the rival. Every few steps each policy is frozen anew, as a revision of a
second adapter that is never trained. So the engine holds one base and four adapters. It samples under two of them and
scores the tokens under three policies: by the sampling itself, under the rival's frozen copy (`score(lora=...)`), and
under the base, with every adapter off (`score()`), the reference of the KL penalty.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo import GROUP_SIZE, NUM_PROMPTS, NUM_UNSEEN, Entry, Task, make_items, make_policy
from grpo_lora import parse, rollout, update
from rollout_engine import LoRARequest, RolloutPolicy, exact

NAMES = ("red", "blue")
FREEZE_EVERY = 10
"""Steps between two frozen copies of a policy."""
BONUS = 0.5
"""Most that a right answer earns beside 1."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the example; returns one row of metrics per step and policy."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    trainer = get_peft_model(base, config, adapter_name=NAMES[0])
    trainer.add_adapter(NAMES[1], config)
    exact.enable(trainer)
    sizes = dict(max_loras=2 * len(NAMES), max_lora_rank=options.rank)
    with RolloutPolicy.from_pretrained(str(options.model), dtype="float32", **sizes) as policy:
        history = list(train(policy, trainer, Task(policy.tokenizer), training, unseen, options))
    for name, first, last in zip(NAMES, history, history[-len(NAMES) :], strict=False):
        print(f"{name}: accuracy on {NUM_UNSEEN} unseen words: {first['accuracy']:.3f} -> {last['accuracy']:.3f}")
    return history


def train(
    policy: RolloutPolicy,
    trainer: PeftModel,
    task: Task,
    training: list[Entry],
    unseen: list[Entry],
    options: argparse.Namespace,
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step and policy; its accuracy is that before the step's update."""
    trained, optimizers, draws = {}, {}, random.Random(options.seed)
    for name in NAMES:
        trainer.set_adapter(name)
        trained[name] = [parameter for parameter in trainer.parameters() if parameter.requires_grad]
        optimizers[name] = torch.optim.AdamW(trained[name], lr=options.learning_rate, weight_decay=0.0)
        policy.update_weights(trainer, merge=False)
    for step in range(options.steps + 1):
        if step % FREEZE_EVERY == 0:
            for name in NAMES:
                freeze(policy, trainer, name, revision=step)
        for name, rival in zip(NAMES, reversed(NAMES), strict=True):
            trainer.set_adapter(name)
            accuracy = rollout(policy, task, unseen, 1, temperature=0.0, adapter=name)["next", "reward"].mean().item()
            entries, seed = draws.sample(training, NUM_PROMPTS), draws.getrandbits(63)
            batch = rollout(policy, task, entries, GROUP_SIZE, seed=seed, adapter=name)
            margin = compare(policy, batch, f"{rival} frozen")
            reference = policy.score(batch)  # the base: every adapter is off
            divergence, difference = update(trainer, trained[name], optimizers[name], batch, reference, options)
            report = policy.update_weights(trainer, merge=False)
            row = {
                "step": step,
                "reward": batch["next", "reward"].mean().item(),
                "accuracy": accuracy,
                "margin": margin,
                "kl": divergence,
                "max_logprob_diff": difference,
                "policy_version": report.version,
            }
            print(f"{name:4}  " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
            yield row


def freeze(policy: RolloutPolicy, trainer: PeftModel, name: str, revision: int) -> None:
    """Have a copy of a policy as it is now under a name of its own."""
    tensors = get_peft_model_state_dict(trainer, adapter_name=name)
    config = trainer.peft_config[name]
    policy.add_lora(LoRARequest(f"{name} frozen", tensors=tensors, config=config, revision=revision))


def compare(policy: RolloutPolicy, batch: Any, rival: str) -> float:
    """Add to the rewards of right answers; returns how much likelier answers are than under the rival, in nats."""
    sampled = batch["masks", "all_assistant_mask"]
    apart = (batch["log_probs", "full"] - policy.score(batch, lora=rival)).where(sampled, 0.0)
    margin = apart.sum(-1, keepdim=True)
    batch["next", "reward"] *= 1 + BONUS * margin.sigmoid()
    return margin.mean().item()


if __name__ == "__main__":
    main()
