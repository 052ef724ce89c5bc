"""A policy learns to call a calculator that it did not call before, in a minute or two on two CPU cores.

    python examples/tool_use.py                          makes a small policy on the spot, then trains it
    python examples/tool_use.py --shuffle-advantages     the control: same run, rewards dealt to the wrong episodes

The task: add two numbers of three digits. The made policy has imitated a teacher who answers at once and gets the last
digit wrong, and who has a calculator but uses it one time in five. So greedy decoding never calls it, and is right
one time in ten. Calls are sampled now and then, pay off, and GRPO makes them a habit.

An episode has two turns where the calculator is called: the call, its result as a message of the tool, and the answer.
Text that the policy did not sample is outside `masks.all_assistant_mask` and is not trained on.
"""

import random
import re
from collections.abc import Sequence

import torch
from transformers.utils.logging import disable_progress_bar

from envs_adapters import Observation
from rollout_engine import RolloutPolicy, SamplingParams
from worlds import NUM_UNSEEN, UNSEEN_SEED, Demonstration, Row, character_tokenizer, draw, make_policy, parser, train

OPEN, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
CALL_SHARE = 0.2
"""Of the teacher's answers, those with a call."""
PARAMS = SamplingParams(max_tokens=16)


class Sums:
    """The environment: one sum, one answer, with or without help."""

    def reset(self, seed: int) -> str:
        """Ask for a sum."""
        self.terms = terms_of(random.Random(seed))
        return "+".join(map(str, self.terms))

    def step(self, action) -> Observation:
        """Judge the answer; calls of the calculator do not come here."""
        return Observation(reward=float(action.text == str(sum(self.terms))), terminated=True)


def calculator(expression: str) -> str:
    """Add numbers.

    Args:
        expression: whole numbers with + between them.
    """
    if not re.fullmatch(r"\d{1,9}(\+\d{1,9})*", expression):
        return "?"
    return str(sum(map(int, expression.split("+"))))


PLAY = {"env": Sums, "tools": [calculator], "tool_format": "hermes", "max_turns": 3}


def terms_of(draws: random.Random) -> tuple[int, int]:
    """Two numbers of three digits."""
    return draws.randint(100, 999), draws.randint(100, 999)


def demonstrate(draws: random.Random) -> Demonstration:
    """The teacher's answer to a sum."""
    terms = terms_of(draws)
    question, right = "+".join(map(str, terms)), str(sum(terms))
    asked = (f"<calculator><user>{question}<eos><assistant>", False)
    if draws.random() < CALL_SHARE:
        called = [(f"{OPEN}{question}{CLOSE}<eos>", True), (f"<tool>{right}<eos><assistant>", False)]
        return [asked, *called, (f"{right}<eos>", True)]
    return [asked, (f"{right[:-1]}{draws.randint(0, 9)}<eos>", True)]


def measure(policy: RolloutPolicy) -> Row:
    """Accuracy and calls of greedy decoding on unseen sums."""
    greedy = PARAMS.clone(temperature=0)
    batch = policy.rollout(None, greedy, **PLAY, num_episodes=NUM_UNSEEN, seed=UNSEEN_SEED, use_tqdm=False)
    calls = sum(any(m["role"] == "tool" for m in messages) for messages in batch["messages"])
    return {"accuracy": batch["next", "reward"].mean().item(), "calls": calls / NUM_UNSEEN}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parser(__doc__.splitlines()[0], "runs/tool_use", steps=40, warm_up_steps=600).parse_args(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    tokenizer = character_tokenizer("0123456789+?", ["<calculator>", OPEN, CLOSE])
    path = make_policy(options.out / "policy", tokenizer, demonstrate, options)
    history = train(path, PLAY, PARAMS, measure, options)
    lines = {"accuracy": f"greedy accuracy, {NUM_UNSEEN} unseen sums", "calls": "share of them with a call"}
    draw(history, lines, "learning to call a calculator", options.out / "learning_curve.png")
    first, last = history[0], history[-1]
    for key in ("accuracy", "calls"):
        print(f"{key} {first[key]:.3f} -> {last[key]:.3f}")
    return history


if __name__ == "__main__":
    main()
