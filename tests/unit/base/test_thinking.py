"""Which tokens a budget of thinking forces, against its definition on the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.base.thinking import Tag, Thinking, ThinkingState, count_sampled, ends_open

START, END = Tag(1, {1: [1]}), Tag(1, {2: [1]})
LONG_END = Tag(3, {7: [1], 8: [0, 1, 2], 9: [0, 2, 3], 6: [0, 1, 3]})
"""7 8 9, and 6 as another spelling of 8 9."""


def budget(num, *, is_open=False, end=END, closing=(2,)):
    return Thinking(num, is_open, START, end, list(closing))


def played(rule, drawn):
    """The output of a sequence that draws these tokens where none is forced, and which of them are forced."""
    state, out, marks = ThinkingState(rule, 0), [], []
    drawn = list(drawn)
    while drawn or state.next_forced(out) is not None:
        forced = state.next_forced(out)
        out.append(drawn.pop(0) if forced is None else forced)
        marks.append(forced is not None)
    return out, marks


@pytest.mark.parametrize(
    "rule, drawn, out",
    [
        (budget(2, is_open=True), [5, 5, 5], [5, 5, 2, 5]),
        (budget(2), [5, 5, 5, 5], [5, 5, 5, 5]),
        (budget(2), [5, 1, 5, 5, 4], [5, 1, 5, 5, 2, 4]),
        (budget(2), [1, 5, 2, 4, 4, 4], [1, 5, 2, 4, 4, 4]),
        (budget(2), [1, 5, 2, 4, 1, 5, 4], [1, 5, 2, 4, 1, 5, 2, 4]),
        (budget(0), [4, 1, 1, 4], [4, 1, 2, 1, 2, 4]),
        (budget(0, is_open=True), [4], [2, 4]),
        (budget(1, is_open=True, end=LONG_END, closing=(7, 8, 9)), [5, 4], [5, 7, 8, 9, 4]),
        (budget(1, is_open=True, end=LONG_END, closing=(7, 8, 9)), [7, 4], [7, 8, 9, 4]),  # what is sampled of it stays
        (budget(3, is_open=True, end=LONG_END, closing=(7, 8, 9)), [7, 6, 4, 4, 4, 4], [7, 6, 4, 4, 4, 4]),
        (budget(2, is_open=True, end=LONG_END, closing=(7, 8, 9)), [7, 7, 4], [7, 7, 8, 9, 4]),
    ],
)
def test_the_closing_text_is_forced_behind_the_budget_and_nowhere_else(rule, drawn, out):
    found, marks = played(rule, drawn)
    assert found == out
    assert sum(marks) == len(out) - len(drawn)
    state = ThinkingState(rule, 0)
    assert [state.append(token_id) for token_id in out] == marks  # known from the tokens alone
    assert count_sampled(rule, out) == state.num_sampled <= rule.budget


tokens = st.lists(st.sampled_from([1, 2, 5, 6, 7, 8, 9]), max_size=30)
rules = st.builds(
    lambda num, is_open, options: budget(num, is_open=is_open, **options),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from([{}, dict(end=LONG_END, closing=[7, 8, 9])]),
)


@settings(max_examples=60, deadline=None)
@given(rule=rules, drawn=tokens)
def test_no_more_than_the_budget_is_ever_sampled_inside(rule, drawn):
    out, marks = played(rule, drawn)
    assert [t for t, forced in zip(out, marks, strict=True) if not forced] == drawn
    assert count_sampled(rule, out) <= rule.budget
    for end in range(len(out) + 1):  # a state that begins anew in the middle tells the same
        assert ThinkingState(rule, 0).next_forced(out[:end]) == (
            None if end == len(out) or not marks[end] else out[end]
        )


@settings(max_examples=60, deadline=None)
@given(rule=rules, drawn=tokens, num_unknown=st.integers(0, 4))
def test_what_may_be_forced_is_known_before_the_last_tokens_are(rule, drawn, num_unknown):
    out, marks = played(rule, drawn)
    for place, is_forced in enumerate(marks):
        known = max(0, place - num_unknown)
        may = ThinkingState(rule, 0).may_force(out[:known], place)
        assert may >= is_forced
        if known == place:
            assert may == is_forced


def test_a_fork_leaves_its_source_as_it_is():
    rule = budget(2, is_open=True)
    state = ThinkingState(rule, 0)
    state.append(5)
    fork = state.fork()
    assert fork.next_forced([5, 5]) == 2
    assert state.next_forced([5]) is None


@pytest.mark.parametrize(
    "prompt, is_open",
    [([], False), ([1], True), ([4, 1, 4], True), ([1, 4, 2], False), ([1, 2, 1], True), ([2], False)],
)
def test_a_prompt_is_open_if_its_last_tag_opens(prompt, is_open):
    assert ends_open(START, END, prompt) == is_open


@pytest.mark.parametrize(
    "changes, problem",
    [
        (dict(end=Tag(1, {2: [2]})), "end.moves[2] does not fit length 1"),
        (dict(end=Tag(2, {2: [1, 1]})), "end.moves[2] does not fit length 2"),
        (dict(end=Tag(2, {2: []})), "end.moves[2] does not fit length 2"),
        (dict(closing=[5]), "closing does not complete the end"),
        (dict(end=Tag(0, {})), "end is empty"),
    ],
)
def test_a_budget_that_cannot_be_followed_says_why(changes, problem):
    fields = dict(budget=1, is_open=True, start=START, end=END, closing=[2])
    assert Thinking(**fields).problem() == ""
    assert Thinking(**(fields | changes)).problem() == problem
