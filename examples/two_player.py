"""A policy learns a game of two players by playing against itself, in a minute or two on two CPU cores.

    python examples/two_player.py                          makes a small policy on the spot, then trains it
    python examples/two_player.py --shuffle-advantages     the control: same run, rewards dealt to the wrong players

The game: two players take 1, 2 or 3 sticks in turn from a heap, and who takes the last one wins. A player says how many
sticks are left after the move. No heap is a multiple of four at the start, so who begins can win, by leaving a multiple
of four each time. The made policy has imitated players that take any number that is allowed.

Both seats are the same policy, and both train. Each has a row of its own in the batch; its group, over which GRPO
compares rewards, is the same seat of the same start. Were both seats of a start one group, its mean would be 1/2
whoever is ahead, and a move that keeps a won game would earn as much as one that turns a lost one.

What it learned is measured against two opponents that it never met in training, which play inside the environment: one
that takes any number, and one that makes no mistake and so punishes each of the policy's.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers.utils.logging import disable_progress_bar

from envs_adapters import Action, Observation
from rollout_engine import RolloutPolicy, SamplingParams
from worlds import UNSEEN_SEED, Demonstration, Row, character_tokenizer, draw, make_policy, parser, train

MOST = 3
"""Sticks that a player may take."""
HEAPS = [sticks for sticks in range(5, 16) if sticks % (MOST + 1)]
PARAMS = SamplingParams(max_tokens=2)
NUM_GAMES = 100
"""With each opponent."""


class Sticks:
    """The environment: a heap, two players. Each reads how many sticks are left."""

    num_seats = 2

    def reset(self, seed: int) -> str:
        """Lay out the heap; seat 0 begins."""
        self.draws = random.Random(seed)
        self.left = self.draws.choice(HEAPS)
        return str(self.left)

    def step(self, action: Action) -> Observation:
        """Take sticks. Who takes the last one wins, and who says what cannot be loses."""
        me, other = action.seat, 1 - action.seat
        if action.text not in map(str, may_leave(self.left)):
            return Observation("", {me: 0.0, other: 1.0}, terminated=True)
        self.left = int(action.text)
        if not self.left:
            return Observation("", {me: 1.0, other: 0.0}, terminated=True)
        return Observation(str(self.left), seat=other)


class Against(Sticks):
    """The same game for one player, who begins; `opponent` is the other."""

    num_seats = 1

    def __init__(self, opponent: Callable[[int, random.Random], int]) -> None:
        self.opponent = opponent

    def step(self, action: Action) -> Observation:
        """Take sticks, and let the opponent take some."""
        seen = super().step(action)
        if not seen.terminated:
            seen = super().step(Action(str(self.opponent(self.left, self.draws)), seat=1))
        seen.reward = seen.reward[0] if seen.terminated else 0.0
        return seen


def may_leave(left: int) -> range:
    """How many sticks a move may leave of these."""
    return range(max(0, left - MOST), left)


def careless(left: int, draws: random.Random) -> int:
    """Any move that is allowed."""
    return draws.choice(may_leave(left))


def perfect(left: int, draws: random.Random) -> int:
    """The move that leaves a multiple of four, where there is one."""
    return next((after for after in may_leave(left) if after % (MOST + 1) == 0), careless(left, draws))


def demonstrate(draws: random.Random) -> Demonstration:
    """One seat's part of a game between careless players."""
    left, is_mine, said = draws.choice(HEAPS), draws.random() < 0.5, []
    while left:
        after = careless(left, draws)
        if is_mine:
            said += [(f"<user>{left}<eos><assistant>", False), (f"{after}<eos>", True)]
        left, is_mine = after, not is_mine
    return said


def measure(policy: RolloutPolicy) -> Row:
    """Share of games that greedy decoding wins, against each opponent."""
    greedy, wins = PARAMS.clone(temperature=0), {}
    games = {"num_episodes": NUM_GAMES, "seed": UNSEEN_SEED, "use_tqdm": False}
    for opponent in (careless, perfect):
        batch = policy.rollout(None, greedy, env=partial(Against, opponent), **games)
        wins[opponent.__name__] = batch["next", "reward"].mean().item()
    return wins


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the example; returns the rows written to metrics.jsonl."""
    defaults = {"steps": 30, "warm_up_steps": 150, "learning_rate": 2e-4}
    options = parser(__doc__.splitlines()[0], "runs/two_player", **defaults).parse_args(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    tokenizer = character_tokenizer("0123456789", [str(sticks) for sticks in range(10, 1 + max(HEAPS))])
    path = make_policy(options.out / "policy", tokenizer, demonstrate, options)
    history = train(path, {"env": Sticks}, PARAMS, measure, options)
    lines = {name: f"greedy wins against the {name} opponent, {NUM_GAMES} games" for name in ("careless", "perfect")}
    draw(history, lines, "learning a game by self-play", options.out / "learning_curve.png")
    first, last = history[0], history[-1]
    for key in lines:
        print(f"wins against the {key} opponent {first[key]:.3f} -> {last[key]:.3f}")
    return history


if __name__ == "__main__":
    main()
