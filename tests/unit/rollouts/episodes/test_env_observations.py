"""What environments return is normalised, or refused with the reason."""

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from envs_adapters.base import Observation
from rollout_engine.rollouts.episodes.observations import MAX_TEXT_BYTES, ObservationError, as_observation, plain_data

USER = {"role": "user", "content": "hi"}

ACCEPTED_BY_STEP = [
    (Observation("a", 1, True), Observation("a", {0: 1.0}, True)),
    (Observation(), Observation([], {0: 0.0})),
    (("a", 0.5, False, True, None), Observation("a", {0: 0.5}, truncated=True)),
    (Observation([USER], np.float32(0.5)), Observation([USER], {0: 0.5})),
    (Observation(USER, torch.tensor([2])), Observation([USER], {0: 2.0})),
    (Observation("a", True, np.bool_(True)), Observation("a", {0: 1.0}, True)),
    (SimpleNamespace(messages="a", reward=0, terminated=False, truncated=False), Observation("a", {0: 0.0})),
]


@pytest.mark.parametrize("value, expected", ACCEPTED_BY_STEP)
def test_a_step_may_return(value, expected):
    assert as_observation(value, 1, 0) == expected


@pytest.mark.parametrize("value, messages", [("a", "a"), (USER, [USER]), ([USER], [USER]), (("a", {"b": 1}), "a")])
def test_a_reset_may_return_messages_alone(value, messages):
    observation = as_observation(value)
    assert (observation.messages, observation.reward, observation.terminated) == (messages, {}, False)


def test_rewards_of_several_seats_are_kept_and_a_number_is_of_the_seat_that_acted():
    assert as_observation(Observation("a", {0: 1, np.int64(2): np.float64(-1)}, seat=2), 3, 0).reward == {0: 1.0, 2: -1}
    assert as_observation(Observation("a", 3), 3, 1).reward == {1: 3.0}


REFUSED = [
    (Observation("a", math.nan), "finite number"),
    (Observation("a", math.inf), "finite number"),
    (Observation("a", {0: -math.inf}), "finite number"),
    (Observation("a", None), "finite number.*not NoneType"),
    (Observation("a", "1"), "finite number.*not str"),
    (Observation("a", np.zeros(2)), "finite number"),
    (Observation("a", 10**400), "finite number"),
    (Observation("a", 1e39), "must be finite in float32"),
    (Observation("a", {0: -(10**39)}), "must be finite in float32"),
    (Observation("a", {1: 1.0}), "seat from 0 to 0"),
    (Observation("a", seat=1), "num_seats"),
    (Observation("a", terminated=1), "terminated=1.*True or False"),
    (Observation("a", truncated=None), "truncated=None"),
    (Observation(5), "messages=5.*not int"),
    (Observation(b"a"), "messages=b'a'"),
    (Observation([{"content": "a"}]), r"messages\[0\].*role"),
    (Observation([{"role": "user", "content": 1}]), "content.*not int"),
    (Observation("\ud800"), "Unicode"),
    (Observation("a" * (MAX_TEXT_BYTES + 1)), "1048577 bytes"),
    (Observation([{"role": "user", "content": "ä" * (MAX_TEXT_BYTES // 2)}]), "bytes of text"),
    (Observation("a", info=[1]), "info=.*not list"),
    ("a", "an Observation or the tuple"),
    (("a", 1.0, False, {}), "not tuple"),
    (None, "not NoneType"),
]


@pytest.mark.parametrize("value, reason", REFUSED)
def test_a_step_is_refused_that_returns(value, reason):
    with pytest.raises(ObservationError, match=reason):
        as_observation(value, 1, 0)


@pytest.mark.parametrize("value", [None, 5, ["a"], [USER, "a"]])
def test_a_reset_is_refused_that_returns(value):
    with pytest.raises(ObservationError):
        as_observation(value)


def test_a_reward_at_the_reset_of_several_seats_must_name_them():
    assert as_observation(Observation("a", 1.0)).reward == {0: 1.0}
    with pytest.raises(ObservationError, match="Nobody has acted"):
        as_observation(Observation("a", 1.0), 2)


def test_what_msgpack_cannot_carry_becomes_plain_data_or_its_repr():
    value = {"a": np.arange(2), 1: {2}, "c": complex(1, 2), "d": 1 << 70, "e": ("x", None), "f": "\ud800"}
    plain = {"a": [0, 1], "1": [2], "c": "(1+2j)", "d": repr(1 << 70), "e": ["x", None], "f": "?"}
    assert plain_data(value) == plain
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain_data(value))) == plain
    circle = []
    circle.append(circle)
    assert msgspec.msgpack.encode(plain_data(circle))
