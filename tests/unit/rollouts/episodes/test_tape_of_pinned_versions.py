"""Episodes that keep one policy version and are killed: they continue under that version, or end as they would have."""

import time

import pytest

from rollout_engine.rollouts.journal.identity import FrontendWeights
from tests.unit.rollouts.episodes.playing import Counting, play, sampled_turns
from tests.unit.rollouts.episodes.test_pinned_versions import push, versions_of
from tests.unit.rollouts.episodes.test_tape import SIX, Drifting, assert_same, make_policy
from tests.unit.rollouts.killed_writes import EACH_KILL, killed_at

PINNED = {"pin_version": True, "num_samples": 2}


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    """Digests of the fake model's weights."""
    monkeypatch.setattr(FrontendWeights, "read_digest", lambda self: f"d{self.version}")


class Pushing(Counting):
    """An update arrives before it takes its second step, in each life of its policy once."""

    policy = None

    def step(self, action):
        if self.turn == 1 and not Pushing.policy.frontend.client.policy_version:
            push(Pushing.policy)
        return super().step(action)


def play_with_a_push(**options):
    Pushing.policy = make_policy()
    return play(Pushing.policy, Pushing, **PINNED, **options)


@EACH_KILL
def test_episodes_that_an_update_ended_return_as_they_were_whichever_write_is_the_last(tmp_path, distance):
    with killed_at(0) as writes:
        whole = play_with_a_push(journal=tmp_path / "whole")
    assert "policy_version" in whole["ended_by"] and len(writes) > 10
    for number in range(1, len(writes) + 1, distance):
        with killed_at(number):
            play_with_a_push(journal=tmp_path / str(number))
        made = play_with_a_push(journal=tmp_path / str(number))
        assert all(len(versions_of(made, row)) == 1 for row in range(2))
        assert_same(play_with_a_push(journal=tmp_path / str(number)), made)
    assert_same(play_with_a_push(journal=tmp_path / "whole"), whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [8, 14, 20, 26])
def test_after_a_kill_and_an_update_no_episode_has_turns_of_both_versions(tmp_path, caplog, number):
    with killed_at(number):
        play(make_policy(), journal=tmp_path, pin_version=True, **SIX)
    policy = make_policy()
    push(policy)
    made = play(policy, journal=tmp_path, pin_version=True, **SIX)
    assert all(len(versions_of(made, row)) == 1 for row in range(6))
    ended = {ended_by for row, ended_by in enumerate(made["ended_by"]) if versions_of(made, row) == {1}}
    assert ended <= {"terminated"} and "continues under version" not in caplog.text
    assert_same(play(policy, journal=tmp_path, pin_version=True, **SIX), made)


def test_a_version_for_all_episodes_ends_those_that_were_begun_under_it(tmp_path):
    with killed_at(6):
        play(make_policy(), journal=tmp_path, policy_version=0)
    policy = make_policy()
    push(policy)
    made = play(policy, journal=tmp_path, policy_version=0)
    assert list(made["ended_by"]) == ["policy_version"] and versions_of(made) == {0}


def test_an_episode_that_begins_anew_takes_the_version_that_is_live(tmp_path):
    with killed_at(7):
        play(make_policy(), Drifting, journal=tmp_path, pin_version=True)
    policy = make_policy()
    push(policy)
    made = play(policy, Drifting, journal=tmp_path, pin_version=True)
    assert list(made["ended_by"]) == ["terminated"] and versions_of(made) == {1}


class Slow(Counting):
    """Its second step takes a while in its second life."""

    lives = 0

    def reset(self, seed):
        Slow.lives += 1
        return super().reset(seed)

    def step(self, action):
        if self.turn == 1 and Slow.lives == 2:
            time.sleep(1.0)
        return super().step(action)


def test_an_episode_whose_time_is_up_while_it_is_played_again_gains_no_turns_later(tmp_path):
    Slow.lives = 0
    options = {"journal": tmp_path, "episode_timeout": 30.0}
    with killed_at(9):  # the end of its last turn
        play(make_policy(), Slow, **options)
    made = play(make_policy(), Slow, **(options | {"episode_timeout": 0.5}))
    assert list(made["ended_by"]) == ["episode_timeout"] and made["num_turns"].item() == 2
    again = play(make_policy(), Slow, **options)
    assert sampled_turns(again, 0) == sampled_turns(made, 0)
    assert_same(again, made)
