"""Environments of several players."""

import torch

from envs_adapters import Observation
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import CODEC, make_engine
from tests.unit.rollouts.episodes.playing import play


class TakingTurns:
    """Two players add up; each hears the other's last words. Seat 1 wins."""

    num_seats = 2

    def reset(self, seed):
        self.turn = 0
        return Observation(f"seat 0, game {seed % 7}: ", seat=0)

    def step(self, action):
        assert action.seat == self.turn % 2
        self.turn += 1
        if self.turn == 5:
            return Observation("", {0: -1.0, 1: 1.0}, terminated=True)
        seat = self.turn % 2
        return Observation(f" other said {len(action.text)}: " if self.turn > 1 else "seat 1: ", 0.25, seat=seat)


def test_self_play_has_a_row_for_each_seat(policy):
    batch = play(policy, TakingTurns, num_episodes=2, num_samples=2)
    assert batch["seat"].tolist() == [0, 1] * 4
    assert batch["episode_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch["group_id"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert batch["num_turns"].tolist() == [3, 2] * 4
    assert batch["next", "reward"].flatten().tolist() == [-0.5, 1.5] * 4
    assert batch["rewards", "turn"][:2].tolist() == [[0.25, 0.25, -1.0], [0.25, 1.25, 0.0]]
    assert len(set(batch["seed"].tolist())) == 8


def test_a_function_plays_a_seat(policy):
    heard = []

    def parrot(messages):
        heard.append(len(messages))
        return "squawk"

    batch = play(policy, TakingTurns, seats={1: parrot})
    assert batch["seat"].tolist() == [0]
    assert heard == [1, 3]
    assert " other said 6: " in batch["text", "response"][0]


def test_another_policy_plays_a_seat(policy):
    other = RolloutPolicy(make_engine(CODEC, max_model_len=256))
    batch = play(policy, TakingTurns, num_episodes=3, seats={1: other})
    alone = play(policy, TakingTurns, num_episodes=3)
    assert batch["seat"].tolist() == [0, 1] * 3
    assert torch.equal(batch["tokens", "full"], alone["tokens", "full"]), "both engines have the same weights"
