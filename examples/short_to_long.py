"""A policy was shown words of three to five letters spelled backward, and learns longer ones by reward alone.

    python examples/short_to_long.py                          makes a small policy on the spot, then trains it
    python examples/short_to_long.py --shuffle-advantages     the control: same run, rewards dealt to the wrong answers

Imitation shows no word of six or seven letters. Reinforcement asks for nothing else, and pays for right answers only:
it can only amplify what is sampled now and then. A policy that imitates in the usual way hardly ever spells a longer
word: it has learned distances between letters that longer words do not have. So imitation here leaves random gaps
between positions (`worlds.spread`), and ends early. Then some of the longer words come out right, and the reward does
the rest.
"""

import random
import string
from collections.abc import Sequence
from functools import partial

import reasoning_gym
import torch
from transformers.utils.logging import disable_progress_bar

from envs_adapters import Action, Observation
from rollout_engine import RolloutPolicy, SamplingParams
from worlds import NUM_UNSEEN, UNSEEN_SEED, Demonstration, Row, character_tokenizer, draw, make_policy, parser, train

SHORT, LONG = range(3, 6), range(6, 8)
"""Letters of words."""
MAX_GAP = 1
PARAMS = SamplingParams(max_tokens=10)

Words = dict[int, list[str]]
"""Words of each length."""


class Spell:
    """The environment: one word, one answer."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def reset(self, seed: int) -> str:
        """Ask for a word."""
        self.word = pick(self.words, random.Random(seed))
        return self.word

    def step(self, action: Action) -> Observation:
        """Judge the answer: right or wrong."""
        return Observation(reward=float(action.text == self.word[::-1]), terminated=True)


def pick(words: Words, draws: random.Random) -> str:
    """A word; each length is as likely."""
    return draws.choice(words[draws.choice(list(words))])


def demonstrate(words: Words, draws: random.Random) -> Demonstration:
    """A word and its right answer."""
    word = pick(words, draws)
    return [(f"<user>{word}<eos><assistant>", False), (f"{word[::-1]}<eos>", True)]


def split_words() -> tuple[Words, Words]:
    """The words of reasoning-gym's `spell_backward` to train on, and `NUM_UNSEEN` others of each length."""
    words = {word.lower() for word in reasoning_gym.create_dataset("spell_backward").words}
    shuffled = sorted(word for word in words if set(word) <= set(string.ascii_lowercase))
    random.Random(0).shuffle(shuffled)
    by_length = {length: [word for word in shuffled if len(word) == length] for length in (*SHORT, *LONG)}
    training = {length: words[NUM_UNSEEN:] for length, words in by_length.items()}
    return training, {length: words[:NUM_UNSEEN] for length, words in by_length.items()}


def measure(unseen: Words, policy: RolloutPolicy) -> Row:
    """Accuracy of greedy decoding on unseen long words."""
    greedy = PARAMS.clone(temperature=0)
    asked = partial(Spell, {length: unseen[length] for length in LONG})
    batch = policy.rollout(None, greedy, env=asked, num_episodes=NUM_UNSEEN, seed=UNSEEN_SEED, use_tqdm=False)
    return {"accuracy": batch["next", "reward"].mean().item()}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parser(
        __doc__.splitlines()[0], "runs/short_to_long", steps=160, warm_up_steps=200, learning_rate=2e-4
    ).parse_args(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    training, unseen = split_words()
    teacher = partial(demonstrate, {length: training[length] for length in SHORT})
    tokenizer = character_tokenizer(string.ascii_lowercase)
    path = make_policy(options.out / "policy", tokenizer, teacher, options, max_gap=MAX_GAP)
    asked = partial(Spell, {length: training[length] for length in LONG})
    history = train(path, {"env": asked}, PARAMS, partial(measure, unseen), options)
    label = f"greedy accuracy, {NUM_UNSEEN} unseen words of 6 or 7 letters"
    draw(history, {"accuracy": label}, "words longer than any that was shown", options.out / "learning_curve.png")
    print(f"accuracy {history[0]['accuracy']:.3f} -> {history[-1]['accuracy']:.3f}")
    return history


if __name__ == "__main__":
    main()
