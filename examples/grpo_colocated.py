"""GRPO with engine and trainer in one process and one memory: they take turns, and each has it all to itself.

    rollout ──> sleep(2) ──> train ──> wake weights ──> update ──> wake KV ──> rollout ...
                frees KV,              room for         fills      room for
                weights and            the weights      them       the KV pool
                packed copies

python examples/grpo_colocated.py                             a tiny random model learns to say even bytes
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, advantages, exact, testing

PROMPTS = ["one", "two", "three", "four"]
GROUP_SIZE = 16


def reward(prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def train(trainer: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """One GRPO step."""
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    ratio = (logprobs - batch["log_probs", "full"][:, 1:]).exp()
    loss = -(ratio * advantage)[batch["masks", "all_assistant_mask"][:, 1:]].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; returns the mean reward of each step."""
    parser = argparse.ArgumentParser(description="GRPO, engine and trainer taking turns.")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    history = []
    with tempfile.TemporaryDirectory() as directory:
        model = testing.tiny_checkpoint(directory)
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
        with RolloutPolicy.from_pretrained(model, dtype="float32") as policy:
            for step in range(options.steps):
                params = SamplingParams(max_tokens=16, ignore_eos=True)
                batch = policy.rollout(
                    PROMPTS, params, num_samples=GROUP_SIZE, reward_fn=reward, seed=step, use_tqdm=False
                )
                policy.sleep(level=2)
                train(trainer, optimizer, batch)
                policy.wake_up(["weights"])
                report = policy.update_weights(trainer)
                policy.wake_up(["kv_cache"])
                history.append(batch["next", "reward"].mean().item())
                resident = psutil.Process().memory_info().rss / 2**20
                state = f"policy {report.version} {report.staging}, {resident:.0f} MiB"
                print(f"step {step}: reward {history[-1]:.3f}, {state}")
    return history


if __name__ == "__main__":
    main()
