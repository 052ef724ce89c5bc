"""GRPO on any environment, with one command.

    python examples/train_env.py reasoning_gym:spell_backward --option max_word_len=6
    python examples/train_env.py guess.py:GuessNumber --answers 1 2 3 4 5 6 7 --steps 120 --learning-rate 1e-3
    python examples/train_env.py my_file.py:MyEnv --model Qwen/Qwen3-0.6B
    python examples/train_env.py reasoning_gym:spell_backward --shuffle-advantages    the control: no learning

The target is "family:name", as `make_env` takes it, or a class of a file. Without `--model` a small policy is made on
the spot, with a token for each character that the environment uses. It first imitates a player who knows the form of an
answer and little else: on a task of reasoning-gym a teacher who is right one time in four and else makes a mistake; in
any other environment one who says any of `--answers`. What pays off then becomes a habit.

It writes to `--out`: metrics.jsonl (a line for each step), rollouts.jsonl (the episodes of the last step, one a line),
learning_curve.png, and prints three episodes.
"""

import argparse
import functools
import importlib
import inspect
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from envs_adapters import EnvSpec, Message, make_env
from rollout_engine import RolloutPolicy, SamplingParams, testing
from worlds import NUM_UNSEEN, UNSEEN_SEED, Demonstration, Row, character_tokenizer, draw, make_policy, parser, train

RIGHT_SHARE = 0.25
"""Of the teacher's answers."""
MAX_LENGTH = 1024
"""Tokens of an episode that the made policy has room for."""
OFTEN = 0.02
"""Share of the conversations in which a text must come to be one token."""
FEW = 20
"""A task of so few answers has no mistakes of its own form but the other answers."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    made = parser(__doc__.splitlines()[0], "runs/train_env", steps=40, warm_up_steps=400)
    made.add_argument("target", help='"family:name" or "my_file.py:MyClass"')
    made.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="of make_env; may be repeated")
    made.add_argument("--answers", nargs="+", help="what the made policy says at first, any of them at random")
    made.add_argument("--conversations", type=int, default=5_000, help="what the made policy imitates at first")
    made.add_argument("--model", help="checkpoint directory or hub id; default: a small policy made on the spot")
    made.add_argument("--max-turns", type=int, default=8, help="answers in an episode at most")
    made.add_argument("--max-tokens", type=int, help="of each answer; default: 16; 256 with --model")
    made.set_defaults(learning_rate=None)
    options = made.parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = 5e-4 if options.model is None else 1e-6
    if options.max_tokens is None:
        options.max_tokens = 16 if options.model is None else 256
    return options


def environment(target: str, pairs: Sequence[str]) -> EnvSpec:
    """The environment of "family:name" or "my_file.py:MyClass", with options "name=value" whose values are JSON."""
    options = {}
    for name, _, text in (pair.partition("=") for pair in pairs):
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    file, _, attribute = target.rpartition(":")
    if target.endswith(".py"):
        sys.exit(f"{target}: name the class in it, too: {target}:MyClass.")
    if not file.endswith(".py"):
        return make_env(target, **options)
    if not Path(file).is_file():
        sys.exit(f"{file}: there is no such file.")
    sys.path.insert(0, str(Path(file).resolve().parent))
    module = importlib.import_module(Path(file).stem)
    if not hasattr(module, attribute):
        classes = [name for name, each in vars(module).items() if inspect.isclass(each) and hasattr(each, "step")]
        sys.exit(f"{file} has no '{attribute}'. Classes with a step in it: {', '.join(classes) or 'none'}.")
    return make_env(getattr(module, attribute), **options)


# ---------------------------------------------------------------------------------------------------------------------
# What the made policy imitates


def conversations(spec: EnvSpec, options: argparse.Namespace) -> list[list[Message]]:
    """Conversations of a player with the environment, each ending with an answer of the player's."""
    draws, answers = random.Random(options.seed), options.answers or [""]
    seats = range(getattr(spec(), "num_seats", 1))
    players = dict.fromkeys(seats, lambda messages: draws.choice(answers))
    with TemporaryDirectory() as unused, RolloutPolicy.from_pretrained(testing.tiny_checkpoint(unused)) as policy:
        sizes = {"num_episodes": options.conversations, "max_in_flight": 1, "use_tqdm": False}
        played = policy.rollout(
            None, None, env=spec, seats=players, max_turns=options.max_turns, seed=options.seed, **sizes
        )
    found = [messages[: last_answer(messages) + 1] for messages in played["messages"]]
    if options.answers:
        return found
    entries = [info.get("entry") for info in played["info"]]
    if None in entries:
        sys.exit("Give --answers, what the policy is to say at first (such as --answers left right), or a --model.")
    right = [str(entry["answer"]) for entry in entries]
    known = sorted(set(right))
    for messages, answer in zip(found, right, strict=True):
        messages[-1]["content"] = answer if draws.random() < RIGHT_SHARE else wrong(answer, known, draws)
    return found


def last_answer(messages: list[Message]) -> int:
    """Index of the player's last answer."""
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def wrong(answer: str, known: list[str], draws: random.Random) -> str:
    """The answer with its last two characters swapped; where that is no mistake, the answer of another question."""
    swapped = answer[:-2] + answer[-1:] + answer[-2:-1]
    if len(known) > FEW and swapped != answer:
        return swapped
    return draws.choice([other for other in known if other != answer] or [answer])


def demonstration(messages: list[Message]) -> Demonstration:
    """A conversation in pieces, as the made policy's chat template writes them.

    All but the first message is learned: what the environment says to an answer too, as a pretrained model knows much
    of its world.
    """
    pieces = [(f"<{message['role']}>{message['content']}<eos>", True) for message in messages]
    return [(pieces[0][0], False), *pieces[1:]]


def words_of(found: Sequence[list[Message]]) -> list[str]:
    """Texts that become one token: what all first messages begin and end with, and later ones that come often."""
    texts = [messages[0]["content"] for messages in found]
    begin = os.path.commonprefix(texts)
    end = os.path.commonprefix([text[len(begin) :][::-1] for text in texts])[::-1]
    said = Counter(message["content"] for messages in found for message in messages[1:] if message["role"] == "user")
    often = [text for text, count in said.items() if count > OFTEN * len(found)]
    return [text for text in dict.fromkeys([begin, end, *often]) if len(text) > 1]


def made_policy(spec: EnvSpec, options: argparse.Namespace) -> Path:
    """A small policy that has imitated conversations with the environment."""
    found = conversations(spec, options)
    characters = sorted({character for messages in found for message in messages for character in message["content"]})
    tokenizer = character_tokenizer("".join(characters), words_of(found))
    demonstrations = [demonstration(messages) for messages in found]
    return make_policy(
        options.out / "policy", tokenizer, lambda draws: draws.choice(demonstrations), options, max_length=MAX_LENGTH
    )


# ---------------------------------------------------------------------------------------------------------------------
# The run


def measure(policy: RolloutPolicy, play: dict[str, Any], params: SamplingParams) -> Row:
    """Mean reward of greedy decoding, from starts that are the same at every step."""
    greedy = params.clone(temperature=0)
    batch = policy.rollout(None, greedy, **play, num_episodes=NUM_UNSEEN, seed=UNSEEN_SEED, use_tqdm=False)
    return {"greedy": batch["next", "reward"].mean().item()}


def show(path: Path, count: int) -> None:
    """Print an episode of each of the first groups in a file of rollouts."""
    with open(path) as lines:
        firsts = [episode for episode in map(json.loads, lines) if episode["sample_index"] == 0]
        for episode in firsts[:count]:
            print(f"\nepisode {episode['episode_id']}: reward {episode['reward']:g}, {episode['ended_by']}")
            for message in episode["messages"]:
                print(f"  {message['role']}: {message['content']}")


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    spec = environment(options.target, options.option)
    play, params = {"env": spec, "max_turns": options.max_turns}, SamplingParams(max_tokens=options.max_tokens)
    path = options.model or made_policy(spec, options)
    history = train(path, play, params, functools.partial(measure, play=play, params=params), options)
    lines = {"reward": "mean reward of the rollouts", "greedy": f"greedy reward, {NUM_UNSEEN} starts"}
    draw(history, lines, options.target, options.out / "learning_curve.png")
    first, last, rollouts = history[0], history[-1], options.out / "rollouts.jsonl"
    show(rollouts, 3)
    print()
    for key in lines:
        print(f"{key} {first[key]:.3f} -> {last[key]:.3f}")
    print(f"All episodes of the last step: python -m json.tool --json-lines --no-ensure-ascii {rollouts} | less")
    return history


if __name__ == "__main__":
    main()
