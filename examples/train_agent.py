"""The model behind a program that talks HTTP and that nobody changes learns, in minutes on two CPU cores.

    python examples/train_agent.py                           the agent of agent_chat.py, over OpenAI's chat API
    python examples/train_agent.py agent_responses.py        over OpenAI's Responses API
    python examples/train_agent.py agent_messages.py         over Anthropic's Messages API
    python examples/train_agent.py agent_sdk.py              a program of OpenAI's Agents SDK
    python examples/train_agent.py --shuffle-advantages      the control: rewards dealt to the wrong episodes

The task and the teacher are those of examples/tool_use.py: add two numbers of three digits, with a calculator that the
made policy hardly ever calls. Each episode is a process of its own, with a gateway session of its own; what it sampled
comes back as exact rows, with masks and log-probs, however the agent sends its conversation.
"""

import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo import update
from rollout_engine import Agent, RolloutPolicy, SamplingParams, exact, to_jsonl
from tool_use import CLOSE, OPEN, demonstrate, terms_of
from worlds import GROUP_SIZE, UNSEEN_SEED, Row, character_tokenizer, draw, make_policy, parser

CHAT = (
    "{% for tool in tools or [] %}<{{ tool['function']['name'] }}>{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% for call in m['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call["function"]["name"] }}", '
    '"arguments": {{ call["function"]["arguments"] | tojson }}}</tool_call>'
    "{% endfor %}"
    "{{ m['content'] or '' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_TASKS, NUM_UNSEEN, MEASURE_EVERY = 12, 48, 8
PARAMS = SamplingParams(max_tokens=32)


def is_right(task: Any, output: str) -> float:
    """The reward of a run: whether the program printed the sum."""
    return float(output.strip() == str(sum(map(int, task["sum"].split("+")))))


def tasks(draws: random.Random, number: int) -> list[Any]:
    """Sums to ask for."""
    return [{"sum": "+".join(map(str, terms_of(draws)))} for _ in range(number)]


def measure(policy: RolloutPolicy, agent: Agent) -> Row:
    """Accuracy and calls of greedy decoding on unseen sums."""
    unseen = tasks(random.Random(UNSEEN_SEED), NUM_UNSEEN)
    batch = policy.rollout(unseen, PARAMS.clone(temperature=0), env=agent, seed=UNSEEN_SEED, use_tqdm=False)
    calls = sum(any(m["role"] == "tool" for m in messages) for messages in batch["messages"])
    return {"accuracy": batch["next", "reward"].mean().item(), "calls": calls / len(batch)}


def steps(policy: RolloutPolicy, trainer: Any, agent: Agent, options: Namespace) -> Iterator[Row]:
    """Yield one row of metrics per step."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    draws, start = random.Random(options.seed), time.perf_counter()
    with open(options.out / "metrics.jsonl", "w") as metrics:
        for step in range(options.steps + 1):
            asked, seed = tasks(draws, NUM_TASKS), draws.getrandbits(63)
            batch = policy.rollout(asked, PARAMS, env=agent, num_samples=GROUP_SIZE, seed=seed, use_tqdm=False)
            row = {"step": step, "reward": batch["next", "reward"].mean().item()}
            if step % MEASURE_EVERY == 0 or step == options.steps:
                row |= measure(policy, agent)
            row["max_logprob_diff"] = update(trainer, optimizer, batch, options)
            policy.update_weights(trainer)
            row["seconds"] = time.perf_counter() - start
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            metrics.write(json.dumps(row) + "\n")
            yield row
    to_jsonl(batch, options.out / "rollouts.jsonl")


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the example; returns the rows written to metrics.jsonl."""
    made = parser(__doc__.splitlines()[0], "runs/train_agent", steps=40, warm_up_steps=600, learning_rate=2e-4)
    made.add_argument("agent", nargs="?", default="agent_chat.py", help="a script of examples/")
    options = made.parse_args(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    tokenizer = character_tokenizer("0123456789+?", ["<calculator>", OPEN, CLOSE])
    tokenizer.chat_template = CHAT
    path = make_policy(options.out / "policy", tokenizer, demonstrate, options)
    agent = Agent([sys.executable, str(Path(__file__).with_name(options.agent))], reward=is_right)
    with RolloutPolicy.from_pretrained(str(path), dtype="float32") as policy:
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        history = list(steps(policy, trainer, agent, options))
    measured = [row for row in history if "accuracy" in row]
    lines = {"accuracy": f"greedy accuracy, {NUM_UNSEEN} unseen sums", "calls": "share of them with a call"}
    draw(measured, lines, f"the model behind {options.agent}", options.out / "learning_curve.png")
    first, last = measured[0], measured[-1]
    for key in lines:
        print(f"{key} {first[key]:.3f} -> {last[key]:.3f}")
    return history


if __name__ == "__main__":
    main()
