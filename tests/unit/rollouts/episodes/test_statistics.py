"""Statistics of groups and batches count episodes, not rows, and leave out those that failed."""

import random

import pytest
import torch

from envs_adapters import Observation
from rollout_engine import advantages
from rollout_engine.batches.concat import concat
from rollout_engine.batches.jsonl import samples
from rollout_engine.batches.minibatches import minibatches
from rollout_engine.looking.run_watch import RunWatch
from rollout_engine.looking.samples import advantages as viewed_advantages
from rollout_engine.looking.samples import viewed
from rollout_engine.looking.statistics import batch_statistics
from tests.unit.looking.lines import write_lines
from tests.unit.rollouts.episodes.playing import Counting, play

REWRITES = (
    "{% for m in messages %}<{{ m.role }}>{{ 'earlier: ' if m.role == 'assistant' and not loop.last }}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class LongOrShort(Counting):
    """A long episode, of four turns, pays 1; a short one, of one turn, 0. The first answer decides which one it is."""

    def step(self, action):
        self.turn += 1
        if self.turn == 1:
            self.length = 4 if sum(action.token_ids) % 2 else 1
        return Observation("go on", float(self.turn == 4), terminated=self.turn == self.length)


class Flaky(Counting):
    """Three turns, each of which fails for some answers."""

    def step(self, action):
        if sum(action.token_ids) % 5 == 0:
            raise ConnectionError("down")
        return super().step(action)


def branched(policy, env=LongOrShort, **options):
    options = dict(chat_template=REWRITES, on_rewrite="branch", num_episodes=2, num_samples=8) | options
    return play(policy, env, **options)


def first_rows(batch):
    ids = batch["episode_id"].tolist()
    return [ids.index(episode) for episode in dict.fromkeys(ids)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("function", [advantages.grpo, advantages.rloo])
def test_rows_of_an_episode_have_its_advantage_and_count_once(policy, layout, function):
    batch = branched(policy, layout=layout)
    rows = first_rows(batch)
    assert len(rows) == 16 < len(batch["group_id"])
    rewards, groups = batch["next", "reward"], batch["group_id"]
    of_episodes = function(rewards[rows], groups[rows])
    assert len(set(rewards.flatten().tolist())) == 2, "of both kinds"
    number = [rows.index(first) for first in (batch["episode_id"].tolist().index(e) for e in batch["episode_id"])]
    assert torch.equal(function(rewards, groups), of_episodes[number])
    plain = batch.to_tensordict()
    assert not torch.equal(function(rewards, plain["group_id"]), of_episodes[number])
    given = {"episode_ids": plain["episode_id"]}
    assert torch.equal(function(rewards, plain["group_id"], **given), of_episodes[number])


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_parts_and_joined_batches_know_their_episodes(policy, layout):
    batch = branched(policy, layout=layout)
    whole = advantages.grpo(batch["next", "reward"], batch["group_id"])
    batch["advantage"] = whole
    copies = [batch.clone(), batch.to("cpu"), concat(list(minibatches(batch, 7)), group_ids="keep")]
    groups = list(minibatches(batch, batch["group_id"].tolist().count(0), keep_groups=True))[:1]
    for part in [*copies, *groups]:
        assert torch.equal(advantages.grpo(part["next", "reward"], part["group_id"]), part["advantage"])
    twice = concat([batch, batch])
    assert torch.equal(advantages.grpo(twice["next", "reward"], twice["group_id"]), torch.cat([whole, whole]))


def test_failed_episodes_are_in_no_baseline_and_get_zero(policy):
    batch = branched(policy, Flaky, num_samples=16)
    failed = torch.tensor([error is not None for error in batch["error"]])
    assert 0 < failed.sum() < len(failed)
    found = advantages.grpo(batch["next", "reward"], batch["group_id"])
    kept = advantages.grpo(batch[~failed]["next", "reward"], batch[~failed]["group_id"])
    assert torch.equal(found[~failed], kept) and not found[failed].any()
    everything = advantages.grpo(batch["next", "reward"], batch["group_id"], mask=torch.ones_like(failed))
    assert everything[failed].any() and not torch.equal(everything, found)


def test_statistics_of_a_batch_are_of_episodes(policy):
    batch = branched(policy)
    rewards, tokens = batch["next", "reward"][first_rows(batch)], batch["masks", "all_assistant_mask"].sum()
    found = batch_statistics(batch)
    assert found["reward/mean"] == pytest.approx(rewards.mean().item()) != batch["next", "reward"].mean().item()
    assert found["reward/std"] == pytest.approx(rewards.std(correction=0).item())
    assert (found["length/mean"], found["tokens"]) == (tokens / 16, tokens)
    assert found["episodes/failed"] == 0 and found["staleness/max"] == 0
    assert f"sequences {len(batch)}, episodes 16, groups 2" in repr(batch)
    assert f"reward: mean {rewards.mean():.4g}, from 0 to 1" in repr(batch)
    assert "ended by: terminated 16" in repr(batch)


def test_statistics_of_a_batch_leave_out_the_rewards_of_failed_episodes(policy):
    batch = play(policy, Sometimes, num_episodes=8)
    failed = sum(error is not None for error in batch["error"])
    found = batch_statistics(batch)
    assert 0 < failed < 8 and found["episodes/failed"] == failed / 8
    assert found["reward/mean"] == found["reward/min"] == 1 and "reward: mean 1, from 1 to 1" in repr(batch)


class Sometimes(Counting):
    def step(self, action):
        if self.random.random() < 0.4:
            raise ConnectionError("down")
        return Observation(reward=1.0, terminated=True)


def test_views_count_episodes(policy, tmp_path):
    batch = branched(policy)
    lines, rows = list(samples(batch)), first_rows(batch)
    expected = advantages.grpo(batch["next", "reward"], batch["group_id"], scale=False).flatten().tolist()
    found = viewed_advantages(viewed(lines, lambda token_id: None))
    assert found == pytest.approx(expected, abs=1e-6)
    failing = list(
        samples(play(policy, Sometimes, num_episodes=1, num_samples=8, seed=random.Random(1).getrandbits(20)))
    )
    shown = viewed_advantages(viewed(failing, lambda token_id: None))
    assert [value is None for value in shown] == [line["error"] is not None for line in failing]
    assert {value for value in shown if value is not None} == {0.0}

    write_lines(tmp_path / "rollouts.jsonl", lines)
    watch = RunWatch(tmp_path)
    watch.read()
    in_window = [row for row in rows if row < 32]
    mean = batch["next", "reward"][in_window].mean().item()
    assert watch.series()["reward/mean"][0] == pytest.approx(mean)
