"""The TensorDict of episodes."""

import asyncio

import numpy as np
import pytest
import torch

from rollout_engine.batches.concat import concat
from rollout_engine.batches.jsonl import samples
from rollout_engine.batches.minibatches import minibatches
from rollout_engine.batches.trl import to_trl
from tests.unit.rollouts.episodes.playing import PARAMS, Counting, Endless, play, row_ids


def test_layouts_hold_the_same(policy):
    padded, packed = (play(policy, num_episodes=3, layout=layout) for layout in ("padded", "packed"))
    mask = padded["masks", "all_attention_mask"]
    for key in [("tokens", "full"), ("masks", "turn"), ("log_probs", "full"), "policy_version"]:
        assert torch.equal(padded[key][mask], packed[key][0]), key
    assert torch.equal(padded["rewards", "turn"], packed["rewards", "turn"])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_episodes_are_split_and_joined_again(policy, layout):
    batch = play(policy, num_episodes=4, layout=layout)
    short = play(policy, Endless, max_turns=1, layout=layout)
    parts = [*minibatches(batch, 3), short]
    joined = concat(parts, group_ids="keep")
    assert joined["episode_id"].tolist() == [0, 1, 2, 3, 0]
    assert joined["rewards", "turn"].shape == (5, 3)
    lines = [*samples(joined)]
    assert [len(line["turn_rewards"]) for line in lines] == [3, 3, 3, 3, 1]
    for line in lines:
        assert len(line["turns"]) == len(line["response_token_ids"]) == len(line["log_probs"])
        sampled = np.array(line["turns"]) >= 0
        assert all(np.array(line["policy_version"])[~sampled] == -1)
    assert lines[0]["messages"][0]["role"] == "user"
    trl = to_trl(joined)
    assert int(trl["tool_mask"].sum()) < trl["tool_mask"].numel()


def test_groups_come_one_by_one(policy):
    async def collect():
        return [
            group async for group in policy.arollout(None, PARAMS, env=Counting, num_episodes=3, num_samples=2, seed=3)
        ]

    groups = asyncio.run(collect())
    whole = play(policy, num_episodes=3, num_samples=2)
    assert sorted(int(group["group_id"][0]) for group in groups) == [0, 1, 2]
    for group in groups:
        row = int(group["group_id"][0]) * 2
        assert row_ids(group, 1) == row_ids(whole, row + 1)
