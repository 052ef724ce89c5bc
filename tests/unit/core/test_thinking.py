"""Forced tokens come out the same whatever steps a sequence is computed in: against each sequence computed alone."""

import msgspec
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.base.thinking import Tag, Thinking, ThinkingState
from tests.unit.core.oracle import CHEAP_ROWS

START = Tag(1, {token_id: [1] for token_id in range(30)})
END = Tag(2, {90: [1], 91: [0, 1, 2]})
BUDGET = Thinking(3, True, START, END, [90, 91])


def forced_of(rig, key):
    state = ThinkingState(rig.requests[key[0]].thinking, 0)
    return [token_id for token_id in rig.tokens[key] if state.append(token_id)]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "config",
    [
        {},
        dict(num_blocks=12, block_size=4, max_num_seqs=4),
        dict(max_num_batched_tokens=3),
        dict(speculation=SpeculationConfig(), step_seconds=CHEAP_ROWS),
    ],
    ids=["roomy", "few blocks", "small steps", "drafts"],
)
def test_every_sequence_is_forced_as_if_it_were_alone(make_rig, config):
    rig = make_rig(**config)
    for number in range(3):
        rig.add(f"{number}", range(number, 9), n=2, max_tokens=24, thinking=BUDGET, seed=number)
    rig.add("closed", range(9), max_tokens=24, thinking=msgspec.structs.replace(BUDGET, is_open=False))
    rig.add("free", range(9), max_tokens=24)
    rig.run()
    rig.assert_clean()
    forced = [forced_of(rig, key) for key in rig.tokens if key[0] != "free"]
    assert all(each[:2] == [90, 91] for each in forced)
    assert any(len(each) > 2 for each in forced)  # thinking that is opened again is closed at once


def test_a_sequence_that_moves_to_another_core_goes_on_as_it_was(make_rig):
    whole = make_rig()
    whole.add("a", max_tokens=16, thinking=BUDGET)
    whole.run()
    for num_known in (2, 3, 4, 5, 8):
        moved = make_rig()
        request = whole.requests["a"]
        known = whole.tokens["a", 0][:num_known]
        moved.add("b")
        moved.core.add_request(msgspec.structs.replace(request, first_sequence_id=1, output_token_ids=known))
        moved.keys[1], moved.requests["a"], moved.tokens["a", 0] = ("a", 0), request, known.copy()
        moved.run()
        assert moved.tokens["a", 0] == whole.tokens["a", 0]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("thinking.closing[1]", dict(closing=[90, 97])),
        ("thinking", dict(closing=[90])),
        ("thinking", dict(end=Tag(3, {90: [1], 91: [0, 1, 2]}))),
        ("thinking", dict(budget=-1)),
    ],
)
def test_a_budget_that_cannot_be_followed_is_refused(make_rig, field, change):
    rig = make_rig()
    with pytest.raises(RequestError) as refused:
        rig.add("bad", thinking=msgspec.structs.replace(BUDGET, **change))
    assert refused.value.field == field
