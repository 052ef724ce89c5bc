"""A policy learns to read digits from pixels, in less than a minute of one CPU core.

    python examples/read_digits.py             a tiny random model with a vision tower learns
    python examples/read_digits.py --blank     the control: the same run with blank pictures, which cannot be learned

Each step: an environment of gymnasium draws 16 digits, each in a picture with noise; the engine samples 8
answers to each, one token that must be a digit; the trainer takes one policy gradient step through text model and
vision tower, and the new weights go back into the engine. Engine and trainer agree on every log-prob bit for bit,
the tower included, so `max_logprob_diff` is 0.

It writes to `--out`: metrics.jsonl, and rollouts.jsonl with the episodes of the last step and their pictures:

    rollout-engine view runs/read_digits/rollouts.jsonl --html page.html
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

from envs_adapters import make_env
from rollout_engine import RolloutPolicy, SamplingParams, advantages, exact, testing, to_jsonl

NUM_STARTS, GROUP_SIZE, NUM_UNSEEN = 16, 8, 100
UNSEEN_SEED = 1_000_003
SIDE = 16
"""Pixels of a picture's side."""
DIGITS = "7 5 5 5 7|2 6 2 2 7|7 1 7 4 7|7 1 7 1 7|5 5 7 1 1|7 4 7 1 7|7 4 7 5 7|7 1 1 2 2|7 5 7 5 7|7 5 7 1 7"
"""Rows of the ten digits, of three pixels each, as bits."""
NOISE = 60
"""Colours of the noise, of 256."""
SCALE = 2
"""Pixels of the picture for each of a digit."""

Row = dict[str, float]


class DigitEnv(gymnasium.Env[int, int]):
    """Shows a digit and asks which it is. The action is the digit."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space = gymnasium.spaces.Discrete(10)
    observation_space = gymnasium.spaces.Discrete(1)

    def __init__(self, render_mode: str | None = None, blank: bool = False) -> None:
        self.render_mode, self._blank = render_mode, blank

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Draw a digit in white over dark noise."""
        super().reset(seed=seed)
        draws = self.np_random
        self._digit = int(draws.integers(10))
        rows = [[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in DIGITS.split("|")[self._digit].split()]
        shape = np.kron(np.array(rows), np.ones((SCALE, SCALE), int))
        height, width = shape.shape
        down, right = (SIDE - height) // 2, (SIDE - width) // 2
        self._picture = draws.integers(0, NOISE, (SIDE, SIDE, 3), dtype=np.uint8)
        if not self._blank:
            self._picture[down : down + height, right : right + width][shape == 1] = 255
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """End the episode; the reward is 1 if the action is the digit."""
        return 0, float(action == self._digit), True, False, {}

    def render(self) -> np.ndarray:
        """The picture, uint8 [SIDE, SIDE, 3]."""
        return self._picture


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    if "Digit-v0" not in gymnasium.registry:
        gymnasium.register("Digit-v0", DigitEnv)
    env = make_env("gymnasium:Digit-v0", picture="render", action_from_text=int, blank=options.blank)
    path = testing.tiny_vision_checkpoint(options.out / "policy", "qwen2_5_vl", seed=options.seed, std=0.1)
    with RolloutPolicy.from_pretrained(str(path), dtype="float32") as policy:
        trainer = exact.enable(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32))
        history = list(train(policy, trainer, env, options))
    first, last = history[0]["greedy"], history[-1]["greedy"]
    print(f"greedy answers to {NUM_UNSEEN} unseen pictures, share that is right: {first:.2f} -> {last:.2f}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blank", action="store_true", help="control: pictures without digits")
    parser.add_argument("--out", type=Path, default=Path("runs/read_digits"))
    return parser.parse_args(arguments)


def train(policy: RolloutPolicy, trainer: nn.Module, env: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Yield one row of metrics per step; its "greedy" is that of the policy before the step's update."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    draws, start = random.Random(options.seed), time.perf_counter()
    answers = [policy.tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    params = SamplingParams(max_tokens=1, allowed_token_ids=answers)
    play = {"env": env, "max_turns": 1, "use_tqdm": False}
    with open(options.out / "metrics.jsonl", "w") as metrics:
        for step in range(options.steps + 1):
            sizes = {"num_episodes": NUM_STARTS, "num_samples": GROUP_SIZE, "seed": draws.getrandbits(63)}
            batch = policy.rollout(None, params, **sizes, **play)
            row = {"step": float(step), "reward": batch["next", "reward"].mean().item()}
            if step % 20 == 0 or step == options.steps:
                unseen = policy.rollout(
                    None, params.clone(temperature=0), **play, num_episodes=NUM_UNSEEN, seed=UNSEEN_SEED
                )
                row["greedy"] = unseen["next", "reward"].mean().item()
            row["max_logprob_diff"] = update(trainer, optimizer, batch)
            policy.update_weights(trainer)
            row["seconds"] = time.perf_counter() - start
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
            metrics.write(json.dumps(row) + "\n")
            yield row
    to_jsonl(batch, options.out / "rollouts.jsonl")


def update(trainer: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One policy gradient step. Returns the largest |log-prob difference| between engine and trainer before it."""
    tokens, real = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    new = exact.token_logprobs(trainer, tokens, real, **exact.inputs(batch))
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    loss = -(new * advantage)[sampled].mean()
    loss.backward()
    clip_grad_norm_(trainer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return (new - old)[sampled].abs().max().item()


if __name__ == "__main__":
    main()
