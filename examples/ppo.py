"""PPO: a policy and its critic learn to spell words backward, in minutes on two CPU cores.

    python examples/ppo.py                       makes a small policy on the spot, then trains it
    python examples/ppo.py --shuffle-rewards     the control: same run, every reward dealt to another answer
    python examples/ppo.py --model DIRECTORY     trains a policy made before, in runs/grpo/policy for example

Each step: the engine samples one answer to each of 256 prompts; the critic, a network of its own that began as the
policy with a value head, says what it expected after every token; the trainer takes eight clipped steps (Schulman et
al., 2017) on the advantages (GAE, Schulman et al., 2016); the new weights go back into the engine. Engine and trainer
agree on every log-prob bit for bit, so before the first of the eight every ratio is exactly 1.0, and the last column
says 0.0.

The task, the made policy and the learning curve are those of examples/grpo.py, and imported from it.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo import NUM_UNSEEN, Entry, Task, draw, evaluate, make_items, make_policy
from rollout_engine import RolloutPolicy, SamplingParams, advantages, exact, minibatches

NUM_PROMPTS = 256
NUM_EPOCHS, MINIBATCH = 2, 64
GAMMA, LAMBDA = 1.0, 0.95
CLIP = 0.2


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    with RolloutPolicy.from_pretrained(str(options.model), dtype="float32") as policy:
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
        history = list(train(policy, trainer, Task(policy.tokenizer), training, unseen, options))
    draw(history, options.out / "learning_curve.png")
    first, last = history[0]["accuracy"], history[-1]["accuracy"]
    print(f"accuracy on {NUM_UNSEEN} unseen words: {first:.3f} -> {last:.3f}; see {options.out}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="PPO on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="directory of a policy made before; default: one made on the spot")
    parser.add_argument("--steps", type=int, default=30, help="PPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of the policy")
    parser.add_argument("--value-learning-rate", type=float, default=3e-4, help="of the critic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--out", type=Path, default=Path("runs/ppo"))
    return parser.parse_args(arguments)


class Critic(nn.Module):
    """Tokens and mask [B, T] -> expected reward [B, T - 1] before each token but the first; 0 at first."""

    def __init__(self, model: str | Path) -> None:
        super().__init__()
        self.trunk = AutoModel.from_pretrained(model, dtype=torch.float32)
        self.head = nn.Linear(self.trunk.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        hidden = self.trunk(input_ids=tokens, attention_mask=real, use_cache=False).last_hidden_state
        return self.head(hidden[:, :-1]).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(
    policy: RolloutPolicy,
    trainer: nn.Module,
    task: Task,
    training: list[Entry],
    unseen: list[Entry],
    options: argparse.Namespace,
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step. A row's accuracy is that of the policy before the step's update."""
    critic = Critic(options.model)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    value_optimizer = torch.optim.AdamW(critic.parameters(), lr=options.value_learning_rate, weight_decay=0.0)
    draws = random.Random(options.seed)
    sampling = SamplingParams(max_tokens=task.max_tokens)
    with open(options.out / "metrics.jsonl", "w") as metrics:
        for step in range(options.steps + 1):
            entries = draws.sample(training, NUM_PROMPTS)
            start = time.perf_counter()
            batch = policy.rollout(
                task.prompts(entries),
                sampling,
                num_samples=1,
                columns={"entry": entries},
                reward_fn=task.reward,
                seed=draws.getrandbits(63),
                use_tqdm=False,
            )
            rollout_seconds = time.perf_counter() - start
            row = {
                "step": step,
                "reward": batch["next", "reward"].mean().item(),
                "accuracy": evaluate(policy, task, unseen),
                "tokens_per_second": batch["masks", "response"].sum().item() / rollout_seconds,
            }
            start = time.perf_counter()
            row |= update(trainer, critic, optimizer, value_optimizer, batch, options)
            row["training_seconds"] = time.perf_counter() - start
            row["update_ms"] = 1000 * policy.update_weights(trainer).seconds
            report(row)
            metrics.write(json.dumps(row) + "\n")
            yield row


def update(
    trainer: nn.Module,
    critic: Critic,
    optimizer: torch.optim.Optimizer,
    value_optimizer: torch.optim.Optimizer,
    batch: TensorDict,
    options: argparse.Namespace,
) -> dict[str, float]:
    """One PPO step: `NUM_EPOCHS` passes over the batch in minibatches. Returns its figures."""
    tokens, real = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    # Column i belongs to token i + 1: sampled from, and valued at, hidden state i.
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    rewards = batch["next", "reward"].squeeze(1)
    if options.shuffle_rewards:
        rewards = rewards[torch.randperm(len(rewards))]
    with torch.no_grad():
        values = critic(tokens, real) * sampled
    advantage, batch["returns"] = advantages.gae(rewards, values, sampled, gamma=GAMMA, lam=LAMBDA)
    mean, std = advantage[sampled].mean(), advantage[sampled].std()
    batch["advantage"], returns = (advantage - mean) / (std + 1e-6), batch["returns"]
    figures: dict[str, float] = {}
    for _ in range(NUM_EPOCHS):
        for part in minibatches(batch, MINIBATCH, shuffle=True):
            tokens, real = part["tokens", "full"], part["masks", "all_attention_mask"]
            here, before = part["masks", "all_assistant_mask"][:, 1:], part["log_probs", "full"][:, 1:]
            new = exact.token_logprobs(trainer, tokens, real)[here]
            ratio = (new - before[here]).exp()
            figures.setdefault("max_logprob_diff", (new - before[here]).abs().max().item())  # before any step
            step_on(optimizer, trainer, clipped_loss(ratio, part["advantage"][here]))
            step_on(value_optimizer, critic, mse_loss(critic(tokens, real)[here], part["returns"][here]))
    moved = ratio.detach()  # of the last minibatch: how far the step went from the policy that sampled
    return figures | {
        "kl": (moved - 1 - moved.log()).mean().item(),
        "clipped": ((moved - 1).abs() > CLIP).float().mean().item(),
        "entropy": -old[sampled].mean().item(),
        "explained_variance": 1 - ((returns - values)[sampled].var() / (returns[sampled].var() + 1e-6)).item(),
    }


def clipped_loss(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Clipped surrogate, mean over tokens; both arguments [num_tokens]."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def step_on(optimizer: torch.optim.Optimizer, module: nn.Module, loss: Tensor) -> None:
    """One optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# The record


def report(row: dict[str, float]) -> None:
    """Print one step."""
    print(
        f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  kl {row['kl']:.4f}  "
        f"entropy {row['entropy']:.3f}  explained {row['explained_variance']:5.2f}  "
        f"{row['tokens_per_second']:6.0f} tokens/s  max |log-prob diff| {row['max_logprob_diff']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
