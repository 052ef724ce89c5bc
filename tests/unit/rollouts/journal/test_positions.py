"""Positions of collectors: the rows and the run that they belong to are compared before anything is sampled."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.journal.position import (
    Counts,
    OpenGroup,
    Position,
    add_row,
    check_identity,
    position_of,
    row_digest,
    state_of,
)
from rollout_engine.rollouts.journal.rows import read_open_tasks
from rollout_engine.rollouts.plan import GroupTask

IDENTITY = {"seed": 3, "sampling_params": {"temperature": 1.0, "stop": ["a", "b"]}, "engine": {"dtype": "float32"}}


def tasks(number, changed=()):
    return [
        GroupTask(i, f"prompt {i}", f"prompt {i}", SamplingParams(), columns={"answer": i + 100 * (i in changed)})
        for i in range(number)
    ]


def position(number, *open_groups):
    rows = [row_digest(task) for task in tasks(number)]
    digest = 0
    for row in rows:
        digest = add_row(digest, row)
    found = {i: OpenGroup(i, 2**64 - 1 - i, rows[i]) for i in open_groups}
    return Position(
        number, digest, found, num_batches=2, version=5, weights={4: "a", 5: "b"}, counts=Counts(9, 4, 1, 0)
    )


def test_a_state_is_plain_data_and_returns_whole():
    state = json.loads(json.dumps(state_of(position(6, 2, 4), IDENTITY)))
    assert position_of(state, IDENTITY) == position(6, 2, 4)
    assert len(json.dumps(state)) < 700


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"sampling_params": {"temperature": 0.5, "stop": ["a", "b"]}}, r"temperature was 1\.0 and is 0\.5"),
        ({"sampling_params": {"temperature": 1.0}}, r"stop was \['a', 'b'\] and is None"),
        ({"engine": {"dtype": "bfloat16"}}, r"engine\.dtype was 'float32' and is 'bfloat16'"),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(change, why):
    with pytest.raises(RequestError, match=f"state_dict belongs to another run: .*{why}"):
        position_of(state_of(position(3), IDENTITY), IDENTITY | change)


def test_all_differences_are_named():
    with pytest.raises(RequestError, match=r"journal='x' .*dtype was.*; seed was"):
        check_identity("journal='x'", IDENTITY, {**IDENTITY, "seed": 0, "engine": {"dtype": "bfloat16"}})
    check_identity("journal='x'", IDENTITY, IDENTITY)


@pytest.mark.parametrize("wrong", [None, 3, {}, [], {"format": 1}, {"format": "1"}])
def test_anything_but_a_state_is_refused(wrong):
    with pytest.raises(RequestError, match="state_dict"):
        position_of(wrong, IDENTITY)


def test_a_newer_state_is_refused_with_the_reason():
    with pytest.raises(RequestError, match="A newer rollout-engine made it"):
        position_of(state_of(position(3), IDENTITY) | {"format": 2}, IDENTITY)
    with pytest.raises(RequestError, match="unknown field"):
        position_of(state_of(position(3), IDENTITY) | {"more": 2}, IDENTITY)


def test_open_groups_return_with_their_seeds_and_only_as_many_rows_are_read():
    rows = iter(tasks(8))
    found = read_open_tasks(rows, position(6, 2, 4))
    assert [(task.index, task.params.seed) for task in found] == [(2, 2**64 - 3), (4, 2**64 - 5)]
    assert next(rows).index == 6


def test_a_dataset_that_differs_is_refused_with_the_row_if_it_is_known():
    with pytest.raises(RequestError, match=r"dataset\[2\]"):
        read_open_tasks(iter(tasks(6, changed=[2])), position(6, 2, 4))
    with pytest.raises(RequestError, match=r"dataset\[:6\].*the rows that were read before"):
        read_open_tasks(iter(tasks(6, changed=[3])), position(6, 2, 4))
    with pytest.raises(RequestError, match="at least 6 rows long"):
        read_open_tasks(iter(tasks(5)), position(6, 2, 4))


def test_rows_are_compared_by_their_contents():
    def digest(prompt, **columns):
        return row_digest(GroupTask(0, prompt, prompt, SamplingParams(), columns=columns))

    same = {"answer": [1, 2.5, None, True], "image": np.arange(6), "tags": {"b", "a"}, "other": object()}
    assert digest("a", **same) == digest("a", **{**same, "image": np.arange(6), "other": object()})
    values = ["a", b"a", 1, 1.0, True, None, [1], (1, 2), {"a": 1}, {"a": "1"}, [[1]], [1, []], {"a"}, np.ones(2)]
    assert len({digest("p", value=value) for value in values}) == len(values)
    assert digest("a") != digest("b") and digest("a", x=1) != digest("a", y=1)
    picture, other = (Picture.of({"pixel_values": np.full(4, value)}) for value in (1.0, 2.0))
    placed = [PlacedPicture(0, 2, picture), PlacedPicture(0, 2, other), PlacedPicture(1, 3, picture)]
    values = [Path("a.png"), Path("b.png"), picture, other, *placed, np.ones((2, 2)), np.ones((1, 4)), np.zeros((2, 2))]
    assert len({digest("p", value=value) for value in values}) == len(values)
    assert digest("p", value=Path("a.png")) == digest("p", value="a.png")
