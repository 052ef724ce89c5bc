"""Episodes that keep one policy version, and rollouts that ask for versions, while updates come."""

import math
import threading

import pytest

from envs_adapters import Observation
from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.sampling_params import SamplingParams
from tests.unit.rollouts.episodes.playing import Counting, play, sampled_turns

LONG = SamplingParams(max_tokens=12, ignore_eos=True)


def push(policy, by=1):
    """New weights, between two steps."""
    driver = policy.frontend.client.driver
    with driver.boundary(math.inf):
        driver.core.begin_update()
        driver.core.commit_version(driver.core.policy_version + by)
        driver.core.end_update(dirty=False)


def push_at(policy, monkeypatch, *turns):
    """New weights before these turns of the engine, counted from 1."""
    client, num = policy.frontend.client, [0]
    turn = client.turn

    def counted(has_news):
        num[0] += 1
        if num[0] in turns:
            push(policy)
        return turn(has_news)

    monkeypatch.setattr(client, "turn", counted)


def versions_of(batch, row=0):
    versions = batch["policy_version"][row]
    return {*versions[versions >= 0].tolist()}


class Pushing(Counting):
    """An update comes while the environment takes its first step."""

    policy = None

    def step(self, action):
        if not self.turn:
            push(Pushing.policy)
        return super().step(action)


@pytest.fixture
def pushing(policy):
    Pushing.policy = policy
    yield Pushing
    Pushing.policy = None


def test_an_episode_that_meets_an_update_ends_after_the_turns_it_has(policy, pushing):
    batch = play(policy, pushing, LONG, pin_version=True)
    assert list(batch["ended_by"]) == ["policy_version"] and list(batch["error"]) == [None]
    assert batch["num_turns"].item() == 1 and versions_of(batch) == {0} and len(sampled_turns(batch, 0)[0]) == 12
    assert batch["next", "truncated"].item() and not batch["next", "terminated"].item()
    assert "ended by: policy_version 1" in str(batch)


def test_without_the_pin_it_goes_on_under_the_new_version(policy, pushing):
    batch = play(policy, pushing, LONG)
    assert list(batch["ended_by"]) == ["terminated"] and versions_of(batch) == {0, 1}


def test_without_an_update_nothing_differs(policy):
    free = play(policy, num_episodes=3, num_samples=2)
    kept = play(policy, num_episodes=3, num_samples=2, pin_version=True)
    assert (free["tokens", "full"] == kept["tokens", "full"]).all()
    assert list(free["ended_by"]) == list(kept["ended_by"])


def test_an_update_in_the_first_turn_begins_it_again_under_the_new_version(policy, monkeypatch):
    push_at(policy, monkeypatch, 5)
    batch = play(policy, Counting, LONG, pin_version=True, num_episodes=2)
    assert list(batch["ended_by"]) == ["terminated"] * 2
    assert versions_of(batch, 0) == versions_of(batch, 1) == {1}


def test_an_update_in_a_later_turn_ends_the_episode_without_the_tokens_of_that_turn(policy, monkeypatch):
    push_at(policy, monkeypatch, 17)
    batch = play(policy, Counting, LONG, pin_version=True)
    assert list(batch["ended_by"]) == ["policy_version"] and versions_of(batch) == {0}
    assert [len(turn) for turn in sampled_turns(batch, 0)] == [12]


def test_a_turn_that_a_pause_cut_short_is_asked_for_again_under_the_same_version(policy, monkeypatch):
    client, num = policy.frontend.client, [0]
    turn = client.turn

    def counted(has_news):
        num[0] += 1
        if num[0] == 17:
            policy.engine.pause_generation(mode="abort")
            policy.engine.resume_generation()
        return turn(has_news)

    monkeypatch.setattr(client, "turn", counted)
    batch = play(policy, Counting, LONG, pin_version=True)
    assert list(batch["ended_by"]) == ["terminated"] and versions_of(batch) == {0} and batch["num_turns"].item() == 3


@pytest.mark.parametrize("updates", [1, 2])
def test_it_may_wait_for_its_first_version_and_keeps_the_one_that_it_found(policy, monkeypatch, updates):
    push_at(policy, monkeypatch, 3, *([6] if updates == 2 else []))
    batch = play(policy, Counting, LONG, pin_version=True, min_policy_version=1)
    assert list(batch["ended_by"]) == ["terminated"] and versions_of(batch) == {updates}


def test_a_version_for_all_episodes_ends_those_that_outlive_it(policy, pushing):
    class Once(Counting):
        def step(self, action):
            return Observation("", 1.0, terminated=True)

    assert list(play(policy, Once, LONG, policy_version=0)["ended_by"]) == ["terminated"]
    batch = play(policy, pushing, LONG, policy_version=0)
    assert list(batch["ended_by"]) == ["policy_version"] and versions_of(batch) == {0}
    with pytest.raises(RequestError, match="policy_version=0 is not allowed: must be at least 1"):
        play(policy, Once, LONG, policy_version=0)


@pytest.mark.parametrize("options", [{"pin_version": 1}, {"pin_version": True, "policy_version": 0}])
def test_options_that_do_not_fit_are_refused(policy, options):
    with pytest.raises(RequestError, match="pin_version"):
        play(policy, **options)


def test_a_rollout_waits_for_its_version(policy):
    thread = threading.Timer(0.1, push, [policy])
    thread.start()
    batch = policy.rollout(["a", "b"], LONG, min_policy_version=1, use_tqdm=False)
    thread.join()
    assert versions_of(batch, 0) == versions_of(batch, 1) == {1}


def test_a_rollout_whose_version_ends_says_so(policy, monkeypatch):
    push_at(policy, monkeypatch, 4)
    with pytest.raises(
        RetryableError, match=r"prompts\[0\], sample 0 was cut short: .*policy_version=0, and version 1"
    ):
        policy.rollout("a", LONG, policy_version=0, use_tqdm=False)


def test_two_places_must_not_ask_for_different_versions(policy):
    with pytest.raises(RequestError, match="policy_version=1 is not allowed: must be absent, or 0 as in the sampling"):
        policy.rollout("a", LONG.clone(policy_version=0), policy_version=1, use_tqdm=False)
