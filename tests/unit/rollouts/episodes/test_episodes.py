"""Episodes: starts, seeds, tokens and rewards."""

import torch

from envs_adapters import Observation
from rollout_engine.base.seeds import mix
from tests.unit.rollouts.episodes.playing import PARAMS, Counting, play, row_ids, sampled_turns


def test_a_batch_has_a_row_for_each_sample_of_each_start(policy):
    batch = play(policy, num_episodes=3, num_samples=2)
    assert batch["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["sample_index"].tolist() == [0, 1] * 3
    assert batch["episode_id"].tolist() == list(range(6))
    assert batch["num_turns"].tolist() == [3] * 6
    assert list(batch["ended_by"]) == ["terminated"] * 6
    starts = [batch["text", "prompt"][row] for row in range(6)]
    assert starts[0] == starts[1] != starts[2] == starts[3]


def test_what_was_sampled_stays_as_it_was_sampled(policy):
    batch = play(policy, num_episodes=4)
    told = sorted(tuple(action.token_ids) for action in Counting.actions)
    assert told == sorted(tuple(ids) for row in range(4) for ids in sampled_turns(batch, row))
    assert torch.equal(batch["masks", "all_assistant_mask"], batch["masks", "turn"] >= 0)


def test_each_turn_is_replayed_by_its_seed(policy):
    batch = play(policy, num_episodes=2, num_samples=2)
    for row in range(4):
        ids, turn = row_ids(batch, row), batch["masks", "turn"][row].tolist()
        seed = int(batch["seed"][row])
        for number, sampled in enumerate(sampled_turns(batch, row)):
            own = seed if number == 0 else mix(seed, (1 << 32) + number)
            start = turn.index(number)
            again = policy.rollout([ids[:start]], PARAMS.clone(seed=own), use_tqdm=False)
            assert again["tokens", "response"][0].tolist() == sampled


def test_rewards_are_those_of_the_environment(policy):
    batch = play(policy, num_episodes=4)
    lengths = [[float(len(ids)) for ids in sampled_turns(batch, row)] for row in range(4)]
    assert batch["rewards", "turn"].tolist() == lengths
    assert batch["next", "reward"].flatten().tolist() == [sum(each) for each in lengths]


class OneTurn:
    def __init__(self, prompts=("one", "three", "a much longer prompt")):
        self.prompts = prompts

    def reset(self, seed):
        return self.prompts[seed % len(self.prompts)]

    def step(self, action):
        return Observation(reward=1.0, terminated=True)


def test_one_turn_is_what_a_rollout_of_the_prompt_samples(policy):
    batch = play(policy, OneTurn, num_episodes=5, num_samples=3)
    prompts = [batch["text", "prompt"][row] for row in range(0, 15, 3)]
    plain = policy.rollout(
        prompts, PARAMS, num_samples=3, seed=3, reward_fn=lambda completions: [1.0] * len(completions), use_tqdm=False
    )
    for key in [
        ("tokens", "full"),
        ("log_probs", "full"),
        ("masks", "all_assistant_mask"),
        "policy_version",
        "seed",
        "truncated",
        ("next", "reward"),
    ]:
        assert torch.equal(batch[key], plain[key]), key
    assert list(batch["finish_reason"]) == list(plain["finish_reason"])


def test_the_same_seed_gives_the_same_batch_whatever_runs_beside_it(policy):
    once, again = (play(policy, num_episodes=6, num_samples=2, max_in_flight=n) for n in (12, 1))
    assert torch.equal(once["tokens", "full"], again["tokens", "full"])
    assert torch.equal(once["log_probs", "full"], again["log_probs", "full"])
    other = play(policy, num_episodes=6, num_samples=2, seed=4)
    assert list(other["text", "prompt"]) != list(once["text", "prompt"])


def test_without_a_seed_every_rollout_is_another(policy):
    once, again = (play(policy, num_episodes=1, seed=None) for _ in range(2))
    assert list(once["text", "prompt"]) != list(again["text", "prompt"])
