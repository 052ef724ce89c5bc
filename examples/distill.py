"""On-policy distillation: a small policy learns from a larger teacher, next to GRPO alone from the same start.

    pip install "rollout-engine[examples]"
    python examples/distill.py                         the task of grpo.py; makes both models on the spot

The student, 0.16 M parameters, has imitated the careless teacher of grpo.py, so that it mostly spells long words wrong.
The teacher, 0.6 M parameters, has imitated right answers. Both trainings sample two answers to 32 prompts a step.
GRPO pays each answer, right or wrong. Distillation pays each token by how much likelier the teacher finds it than the
student (`advantages.reverse_kl`): the teacher scores the student's tokens, in the same call
(`rollout(teachers=[...])`), and no answer is judged. A step of either is the same gradient step but for these numbers.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo import NUM_PROMPTS, NUM_UNSEEN, Entry, Task, evaluate, grpo_loss, make_items, make_policy
from rollout_engine import RolloutPolicy, SamplingParams, Teacher, advantages, exact

STUDENT = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2)
"""Sizes of the student; the teacher has those of the policy of grpo.py."""
WAYS = ("distillation", "GRPO")

Rows = list[dict[str, float]]
Advantages = Callable[[Any], Tensor]
"""Advantages of a rollout's tokens, [B, T]."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Rows]:
    """Run the example; returns the rows of both trainings."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    student = make_policy(options.out / "student", training, options, **STUDENT)
    options.warm_up_steps = options.teacher_steps
    path = make_policy(options.out / "teacher", training, options, lambda word, _: word[::-1])
    with Teacher(str(path), name="large", dtype="float32") as teacher:
        print(f"teacher: accuracy on {NUM_UNSEEN} unseen words {teacher_accuracy(path, unseen):.3f}")
        history = {way: list(train(way, student, teacher, training, unseen, options)) for way in WAYS}
    for way, rows in history.items():
        print(f"{way}: accuracy {rows[0]['accuracy']:.3f} -> {rows[-1]['accuracy']:.3f}; see {options.out}")
    draw(history, options.out / "learning_curve.png")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="On-policy distillation on reasoning-gym's spell_backward.")
    parser.add_argument("--steps", type=int, default=30, help="steps of each training")
    parser.add_argument("--warm-up-steps", type=int, default=500, help="imitation steps of the student")
    parser.add_argument("--teacher-steps", type=int, default=600, help="imitation steps of the teacher")
    parser.add_argument("--samples", type=int, default=2, help="answers to each of 32 prompts a step")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/distill"))
    return parser.parse_args(arguments)


def train(
    way: str,
    student: Path,
    teacher: Teacher,
    training: list[Entry],
    unseen: list[Entry],
    options: argparse.Namespace,
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step, of the policy before its update."""
    draws = random.Random(options.seed)
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32))
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    advantages_of = distillation if way == "distillation" else group_relative
    with (
        RolloutPolicy.from_pretrained(str(student), dtype="float32") as policy,
        open(options.out / f"{way}.jsonl", "w") as metrics,
    ):
        task = Task(policy.tokenizer)
        for step in range(options.steps + 1):
            entries = draws.sample(training, NUM_PROMPTS)
            batch = policy.rollout(
                task.prompts(entries),
                SamplingParams(max_tokens=task.max_tokens),
                num_samples=options.samples,
                columns={"entry": entries},
                reward_fn=task.reward,
                teachers=[teacher],
                seed=draws.getrandbits(63),
                use_tqdm=False,
            )
            sampled = batch["masks", "all_assistant_mask"]
            kl = (batch["log_probs", "full"] - batch["teacher", "large", "log_probs"])[sampled].mean().item()
            row = {"step": step, "reward": batch["next", "reward"].mean().item(), "reverse_kl": kl}
            row["accuracy"] = evaluate(policy, task, unseen)
            row["max_logprob_diff"] = update(trainer, optimizer, batch, advantages_of(batch))
            policy.update_weights(trainer)
            metrics.write(json.dumps(row) + "\n")
            shown = f"accuracy {row['accuracy']:.3f}  reverse KL {kl:.4f}"
            print(f"{way:12} step {step:3d}  reward {row['reward']:.3f}  {shown}", flush=True)
            yield row


def distillation(batch: Any) -> Tensor:
    """How much likelier the teacher finds each token than the policy that sampled it."""
    own, teachers = batch["log_probs", "full"], batch["teacher", "large", "log_probs"]
    return advantages.reverse_kl(own, teachers, batch["masks", "all_assistant_mask"])


def group_relative(batch: Any) -> Tensor:
    """GRPO's advantages, the same for all tokens of an answer."""
    return advantages.per_token(batch, advantages.grpo(batch["next", "reward"], batch["group_id"]))


def update(trainer: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, advantage: Tensor) -> float:
    """One gradient step. Returns the largest |log-prob difference| between engine and trainer before it."""
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    new = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    loss = grpo_loss(new[sampled], old[sampled], advantage[:, 1:][sampled])
    (loss / sampled.sum()).backward()
    clip_grad_norm_(trainer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return (new - old)[sampled].abs().max().item()


def teacher_accuracy(path: Path, unseen: list[Entry]) -> float:
    """Share of unseen words that the teacher itself spells right."""
    with RolloutPolicy.from_pretrained(str(path), dtype="float32") as policy:
        return evaluate(policy, Task(policy.tokenizer), unseen)


def draw(history: dict[str, Rows], path: Path) -> None:
    """Write the learning curves."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for way, rows in history.items():
        axes.plot([row["step"] for row in rows], [row["accuracy"] for row in rows], label=way)
    label = f"greedy accuracy, {NUM_UNSEEN} unseen words"
    axes.set(xlabel="step", ylabel=label, ylim=(0, 1.02), title="a student of 0.16 M parameters, a teacher of 0.6 M")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
