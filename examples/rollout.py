"""Roll out a policy, score it with the trainer's forward, change its weights, roll out again.

python examples/rollout.py                             a tiny random model, made on the spot
python examples/rollout.py --model Qwen/Qwen3-0.6B     a real checkpoint
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, exact, testing

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what a rollout holds, and how far engine and trainer are apart: 0.0, before and after an update."""
    parser = argparse.ArgumentParser(description="Roll out a policy and change its weights.")
    parser.add_argument("--model", help="checkpoint directory or hub id")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or testing.tiny_checkpoint(directory)
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        with RolloutPolicy.from_pretrained(model, dtype="float32") as policy:
            for _ in range(2):
                batch = policy.rollout(PROMPTS, SamplingParams(max_tokens=24), num_samples=4, seed=0, use_tqdm=False)
                print(batch)
                with torch.no_grad():
                    logprobs = exact.token_logprobs(
                        trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"]
                    )
                    difference = (logprobs - batch["log_probs", "full"][:, 1:])[
                        batch["masks", "all_assistant_mask"][:, 1:]
                    ]
                    trainer.get_input_embeddings().weight.mul_(0.9)  # in a trainer: optimizer.step()
                print(f"policy {policy.policy_version}: largest |log-prob difference| {difference.abs().max().item()}")
                print(policy.update_weights(trainer))


if __name__ == "__main__":
    main()
