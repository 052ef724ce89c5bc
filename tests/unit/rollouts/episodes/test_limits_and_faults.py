"""Limits of episodes, and environments that fail."""

import random
import threading

import pytest

from envs_adapters import Observation
from rollout_engine.base.errors import EpisodeError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.batches.jsonl import samples
from tests.unit.rollouts.episodes.playing import Counting, Endless, play, row_ids, sampled_turns


def ends(batch):
    """(terminated, truncated, done) of a batch of one row."""
    return tuple(batch["next", key].item() for key in ("terminated", "truncated", "done"))


def test_an_episode_is_cut_off_after_max_turns(policy):
    batch = play(policy, Endless, max_turns=2)
    assert list(batch["ended_by"]) == ["max_turns"]
    assert (batch["num_turns"].item(), *ends(batch)) == (2, False, True, True)
    assert sum(map(len, sampled_turns(batch, 0))) == int((batch["masks", "turn"] >= 0).sum())


@pytest.mark.parametrize("max_tokens", [None, 30])
@pytest.mark.parametrize("limit", [40, None])
def test_a_row_is_no_longer_than_its_limit_whatever_answers_may_be(policy, limit, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    batch = play(policy, Endless, params, max_turns=1000, max_episode_tokens=limit)
    assert list(batch["ended_by"]) == ["max_episode_tokens"]
    length = len(row_ids(batch, 0))
    assert length == (limit or 256) or max_tokens == 30 and length + 30 > 256, "unless an observation filled it"
    assert (*ends(batch), batch["truncated"].item()) == (False, True, True, True)


@pytest.mark.parametrize("limit", [40, 57, None])
def test_an_episode_is_cut_off_where_its_row_is_full(policy, limit):
    batch = play(policy, Endless, max_turns=1000, max_episode_tokens=limit)
    assert list(batch["ended_by"]) == ["max_episode_tokens"]
    assert (limit or 256) - 36 <= len(row_ids(batch, 0)) <= (limit or 256)
    assert batch["masks", "turn"][0, -1] >= 0, "nothing stands behind the last answer"


def test_a_limit_of_the_environments_own_truncates(policy):
    class Limited(Counting):
        def step(self, action):
            return Observation("", 2.0, truncated=True)

    batch = play(policy, Limited)
    assert "ended by: truncated 1" in str(batch)
    assert (list(batch["ended_by"]), *ends(batch)) == (["truncated"], False, True, True)


@pytest.mark.parametrize("max_tokens, is_cut", [(6, True), (200, False)])
@pytest.mark.parametrize("says", [(True, False), (False, True), (True, True)])
def test_how_an_episode_ended_is_apart_from_how_its_last_answer_ended(policy, says, max_tokens, is_cut):
    class Once(Counting):
        def step(self, action):
            return Observation("", 2.0, *says)

    batch = play(policy, Once, SamplingParams(max_tokens=max_tokens, ignore_eos=is_cut))
    assert ends(batch) == (*says, True)
    assert (batch["truncated"].item(), batch["finish_reason"][0]) == (is_cut, "length" if is_cut else "stop")
    [sample] = samples(batch)
    assert (sample["done"], sample["terminated"], sample["truncated"]) == (True, says[0], is_cut)


def test_rewards_that_add_up_beyond_float32_fail_their_episode(policy):
    class Large(Counting):
        def step(self, action):
            return Observation(" more ", 3e38 if self.random.random() < 0.7 else 0.0)

    batch = play(policy, Large, max_turns=3, num_episodes=8)
    assert batch["next", "reward"].isfinite().all() and batch["rewards", "turn"].isfinite().all()
    assert "The rewards of seat 0 add up to 6e+38, which is not finite in float32." in list(batch["error"])
    assert None in list(batch["error"])


class WithoutSeed(Counting):
    def reset(self):
        return "Go."


class ReadsText(Counting):
    def step(self, action):
        return Observation(action.strip())


@pytest.mark.parametrize(
    "env, said",
    [(WithoutSeed, "one argument, the seed"), (ReadsText, "an action is no str, its text is `action.text`")],
)
def test_a_method_that_takes_something_else_is_told_what_it_gets(policy, env, said):
    with pytest.raises(EpisodeError, match=said):
        play(policy, env)


@pytest.mark.slow
def test_an_episode_ends_when_its_time_is_up(policy):
    released = threading.Event()

    class Slow(Counting):
        def step(self, action):
            if self.turn == 1:
                released.wait(30)
            return super().step(action)

    try:
        batch = play(policy, Slow, num_episodes=2, episode_timeout=0.3)
    finally:
        released.set()
    assert list(batch["ended_by"]) == ["episode_timeout"] * 2
    assert batch["num_turns"].tolist() == [2, 2]
    assert batch["rewards", "turn"][:, 1].tolist() == [0.0, 0.0]


class Faulty(Counting):
    def step(self, action):
        if self.random.random() < 0.4:
            raise ValueError("the die is lost")
        return super().step(action)


def test_a_fault_ends_its_own_episode_with_the_reason(policy, caplog):
    batch = play(policy, Faulty, num_episodes=12)
    errors = list(batch["error"])
    failed = [row for row in range(12) if errors[row] is not None]
    assert 0 < len(failed) < 12
    for row in range(12):
        assert ("the die is lost" in (errors[row] or "the die is lost")) and (
            batch["finish_reason"][row] == "error"
        ) == (row in failed)
        assert bool(batch["next", "terminated"][row]) == (row not in failed)
        assert bool(batch["next", "truncated"][row]) == (row in failed)
    assert batch["next", "done"].all()
    assert f"{len(failed)} of 12 episodes failed" in caplog.text
    assert Counting.actions


def test_faults_of_all_episodes_are_raised(policy):
    class Broken(Counting):
        def reset(self, seed):
            raise KeyError("board")

    with pytest.raises(EpisodeError, match="All 3 episodes failed; the first: .*board") as caught:
        play(policy, Broken, num_episodes=3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_episode_may_end_before_its_first_turn(policy):
    class Over:
        def reset(self, seed):
            return Observation("nothing to do", 0.5, terminated=True)

        def step(self, action):
            raise AssertionError("it has ended")

    class Mixed(Counting):
        def reset(self, seed):
            return Observation("nothing", terminated=True) if seed % 2 else super().reset(seed)

    batch = play(policy, Mixed, num_episodes=8)
    empty = batch["num_turns"] == 0
    assert 0 < int(empty.sum()) < 8
    assert not batch["masks", "all_assistant_mask"][empty].any()
    assert play(policy, Over)["next", "reward"].item() == 0.5


def test_members_of_a_group_must_start_alike(policy):
    class Unseeded(Counting):
        def reset(self, seed):
            super().reset(seed)
            return f"{random.random()} "

    batch = play(policy, Unseeded, num_samples=3)
    assert [error is None for error in list(batch["error"])].count(True) == 1
    assert "gave another start" in next(filter(None, list(batch["error"])))
