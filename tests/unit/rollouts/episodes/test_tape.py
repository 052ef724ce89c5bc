"""A rollout over environments with a journal: ended episodes need no environment, the others are played again."""

import random

import pytest
import torch

from envs_adapters import Observation
from rollout_engine.base.errors import EpisodeError, RequestError
from rollout_engine.batches.rollout_files import read_jsonl
from rollout_engine.rollouts.journal.identity import FrontendWeights
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import CODEC, make_engine
from tests.unit.rollouts.episodes.playing import Counting, Endless, play
from tests.unit.rollouts.killed_writes import EACH_KILL, killed_at

SIX = {"num_episodes": 3, "num_samples": 2}


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    """Digests of the fake model's weights: version -> digest, which a test may change."""
    digests = {}
    monkeypatch.setattr(FrontendWeights, "read_digest", lambda self: digests.get(self.version, f"d{self.version}"))
    return digests


def make_policy():
    return RolloutPolicy(make_engine(CODEC, max_model_len=256))


def assert_same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for name in one.keys(True, True):
        if isinstance(one[name], torch.Tensor):
            assert torch.equal(one[name], other[name]), name
        else:
            assert one[name] == other[name], name


class Drifting(Counting):
    """Its second life differs: it is not determined by seed and actions."""

    resets = 0

    def reset(self, seed):
        Drifting.resets += 1
        self.life = Drifting.resets
        return super().reset(seed)

    def step(self, action):
        observation = super().step(action)
        observation.messages = f"{observation.messages}{self.life}"
        return observation


class Failing(Counting):
    """Ends with an exception in its second turn."""

    def step(self, action):
        if self.turn == 1:
            raise ValueError("broken")
        return super().step(action)


@pytest.mark.quick(1)
@EACH_KILL
@pytest.mark.parametrize("on_resume", ["replay", "anew"])
def test_rows_are_those_of_an_undisturbed_rollout_whichever_write_is_the_last(tmp_path, on_resume, distance):
    whole = play(make_policy(), **SIX)
    with killed_at(0) as writes:
        play(make_policy(), journal=tmp_path / "whole", **SIX)
    assert len(writes) > 50
    for number in range(1, len(writes) + 1, distance):
        options = {"journal": tmp_path / str(number), "on_resume": on_resume}
        with killed_at(number):
            play(make_policy(), **options, **SIX)
        assert_same(play(make_policy(), **options, **SIX), whole)
        assert_same(play(make_policy(), **options, **SIX), whole)


def test_turns_of_the_journal_are_not_sampled_again_and_ended_episodes_need_no_environment(tmp_path):
    with killed_at(40):
        play(make_policy(), journal=tmp_path, max_in_flight=2, **SIX)
    policy, asked = make_policy(), []
    add_request = policy.frontend.client.add_request
    policy.frontend.client.add_request = lambda request, *route: (asked.append(request), add_request(request, *route))
    Counting.actions = []
    made = play(policy, journal=tmp_path, max_in_flight=2, **SIX)
    assert 0 < len(asked) < 12 and len(Counting.actions) < 3 * 6
    assert_same(made, play(make_policy(), **SIX))
    asked.clear()
    Counting.actions = []
    assert_same(play(policy, journal=tmp_path, max_in_flight=2, **SIX), made)
    assert not asked and not Counting.actions


def test_an_environment_that_replies_otherwise_has_its_episode_begun_anew(tmp_path, caplog):
    with killed_at(10):
        play(make_policy(), Drifting, journal=tmp_path, num_episodes=2)
    made = play(make_policy(), Drifting, journal=tmp_path, num_episodes=2)
    assert made["ended_by"] == ["terminated"] * 2 and made["num_turns"].tolist() == [3, 3]
    again = play(make_policy(), Drifting, journal=tmp_path, num_episodes=2)
    assert_same(made, again)
    assert "begins anew: its environment, played again" in caplog.text


def test_limits_return_as_they_were(tmp_path):
    made = [play(make_policy(), Endless, num_samples=2, journal=tmp_path, max_turns=2) for _ in range(2)]
    assert_same(*made)
    assert made[0]["ended_by"] == ["max_turns"] * 2


def test_failures_return_as_they_were(tmp_path):
    reasons = []
    for _ in range(2):
        with pytest.raises(EpisodeError, match="All 2 episodes failed.*broken") as caught:
            play(make_policy(), Failing, num_samples=2, journal=tmp_path)
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1]


def test_results_of_functions_are_taken_from_the_journal(tmp_path):
    calls = []

    def said(messages):
        calls.append(len(messages))
        return f"{len(messages)} messages"

    class Two:
        num_seats = 2

        def reset(self, seed):
            self.random, self.turn = random.Random(seed), 0
            return "begin"

        def step(self, action):
            self.turn += 1
            return Observation(f" {self.turn} ", 1.0, terminated=self.turn == 6, seat=self.turn % 2)

    whole = play(make_policy(), Two, seats={1: said}, num_samples=2)
    num_calls = len(calls)
    for number in (9, 16, 23):
        calls.clear()
        with killed_at(number):
            play(make_policy(), Two, seats={1: said}, num_samples=2, journal=tmp_path / str(number))
        assert_same(play(make_policy(), Two, seats={1: said}, num_samples=2, journal=tmp_path / str(number)), whole)
        assert num_calls <= len(calls) <= num_calls + 2  # both may have been in a call


def test_weights_that_changed_continue_with_a_line_and_those_that_are_gone_begin_anew(tmp_path, caplog, weights):
    def kill(path):
        with killed_at(20):
            play(make_policy(), journal=path, **SIX)

    kill(tmp_path / "newer")
    policy = make_policy()
    policy.engine.core.commit_version(1)
    made = play(policy, journal=tmp_path / "newer", **SIX)
    assert "continues under version 1; its turns so far were sampled by [0]" in caplog.text
    assert {0, 1} <= set(made["policy_version"].flatten().tolist())
    kill(tmp_path / "other")
    weights[0] = "others"
    play(make_policy(), journal=tmp_path / "other", **SIX)
    assert "begins anew: the weights that sampled it are not live (version 0)" in caplog.text


def test_another_rollout_is_refused_by_name(tmp_path):
    play(make_policy(), journal=tmp_path, **SIX)
    for options, why in (
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"env": Endless}, "env was 'Counting' and is 'Endless'"),
        ({"max_turns": 2}, "max_turns was 8 and is 2"),
        ({"num_samples": 3}, "num_samples was 2 and is 3"),
    ):
        with pytest.raises(RequestError, match=f"belongs to another run: .*{why}"):
            play(make_policy(), journal=tmp_path, **(SIX | options))
    with pytest.raises(RequestError, match="on_resume"):
        play(make_policy(), journal=tmp_path, on_resume="again", **SIX)
    with pytest.raises(RequestError, match="journal= needs env="):
        make_policy().rollout(["a"], journal=tmp_path)
    with pytest.raises(RequestError, match="the journal of a collect"):
        make_policy().collect(["a"], journal=tmp_path)


def test_a_drawn_seed_is_kept_and_listeners_get_each_group_once(tmp_path):
    log, groups = tmp_path / "log.jsonl", []
    options = {"seed": None, "journal": tmp_path / "j", "on_group": groups.append}
    made = []
    for _ in range(2):
        policy = make_policy()
        policy.collective_rpc = lambda name: ["digest"]
        policy.frontend.next_seed()
        made.append(play(policy, log_to=log, **options, **SIX))
    assert_same(*made)
    assert len(groups) == 3 and len(read_jsonl(log)) == 6
