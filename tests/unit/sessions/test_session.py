"""Bounds, rewards and the end of sessions."""

import random

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.outputs import CompletionOutput, VersionSpan
from rollout_engine.sessions.errors import SessionEndedError, SessionNotFoundError
from rollout_engine.sessions.limits import SessionLimits
from rollout_engine.sessions.registry import Sessions
from rollout_engine.sessions.samples import join_parts
from rollout_engine.sessions.session import Session

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "limits, bound",
    [
        ({"tokens": 40}, "40 tokens"),
        ({"turns": 2}, "2 answers"),
        ({"num_bytes": 6_000}, "6000 bytes"),
        ({"seconds": 30.0}, "30 seconds"),
    ],
)
def test_a_session_ends_at_its_bounds_and_stays_readable(new_talk, limits, bound):
    talk = new_talk(**limits)
    messages, now = HELLO, 0.0
    with pytest.raises(SessionEndedError, match=bound):
        for _ in range(50):
            now += 10.0
            messages = [*talk.ask(messages, "ab", now=now), HELLO[0]]
    talk.check()
    assert talk.session.num_open == 0 and talk.session.rows()
    assert talk.session.ended_by(now) == next(iter(limits)).removeprefix("num_") or "tokens" in limits


def test_a_budget_of_tokens_bounds_what_is_asked_for_at_once(new_talk):
    talk = new_talk(tokens=100)
    first = talk.place(HELLO, max_tokens=50)
    num_prompt = len(first.prompt_token_ids)
    assert first.max_tokens == 50
    second = talk.place([{"role": "user", "content": "x"}])
    assert second.max_tokens == 100 - 50 - num_prompt - len(second.prompt_token_ids)
    with pytest.raises(SessionEndedError, match="100 tokens"):
        talk.place(HELLO)
    talk.session.cancel(second)
    talk.answer(first, "hi")
    talk.session.cancel(first)
    assert talk.session.num_tokens == num_prompt + 3
    talk.session.cancel(talk.place(HELLO))
    assert talk.session.num_tokens == num_prompt + 3 and talk.session.num_open == 0


def test_rewards_are_of_the_session_or_of_a_row(talk):
    messages = talk.ask(HELLO, "one")
    talk.ask(HELLO, "two")
    assert [row.reward for row in talk.session.rows()] == [None, None]
    talk.session.set_reward(1.0)
    talk.session.set_reward(0.5, row=1)
    assert [row.reward for row in talk.session.rows()] == [1.0, 0.5]
    for value, row in ((float("nan"), None), ("1", None), (True, None), (1.0, 2), (1.0, -1)):
        with pytest.raises(RequestError):
            talk.session.set_reward(value, row)
    talk.ask([*messages, HELLO[0]], "three")
    assert [row.reward for row in talk.session.rows()] == [1.0, 0.5], "rows keep their numbers"


def test_a_deleted_session_holds_nothing_and_takes_nothing(talk):
    talk.ask(HELLO, "one")
    place = talk.place(HELLO)
    talk.session.delete()
    talk.answer(place, "late")
    talk.session.cancel(place)
    assert (talk.session.num_tokens, talk.session.num_bytes, talk.session.num_turns) == (0, 0, 0)
    with pytest.raises(SessionEndedError, match="deleted"):
        talk.place(HELLO)
    talk.sampled.clear()


def test_sessions_are_found_by_id_and_key_alone():
    sessions = Sessions(3, SessionLimits(seconds=100.0))
    made = [sessions.create(now=0.0, seconds=10.0 + index) for index in range(3)]
    with pytest.raises(RetryableError, match="max_sessions=3"):
        sessions.create(now=0.0)
    assert sessions.open(made[0].id, made[0].api_key) is made[0]
    problems = set()
    for session_id, key in ((made[0].id, made[1].api_key), ("unknown", made[0].api_key), (made[0].id, "\udcff")):
        with pytest.raises(SessionNotFoundError) as problem:
            sessions.open(session_id, key)
        problems.add(str(problem.value))
    assert len(problems) == 1, "an answer does not show which ids there are"
    assert len({each.id for each in made} | {each.api_key for each in made}) == 6
    assert all(len(each.id) >= 22 and len(each.api_key) >= 43 for each in made)
    assert sessions.end_late(20.5) == [made[0].id] and made[0].is_deleted and not made[1].is_deleted
    sessions.delete(made[1].id)
    with pytest.raises(SessionNotFoundError):
        sessions.delete(made[1].id)
    assert len(sessions) == 1
    for bounds in ({"seconds": 101.0}, {"seconds": 0.0}, {"tokens": 0}):
        with pytest.raises(RequestError):
            sessions.create(now=0.0, **bounds)


def test_sessions_that_come_and_go_leave_nothing():
    sessions = Sessions(4, SessionLimits())
    for index in range(1_000):
        sessions.delete(sessions.create(now=float(index)).id)
    assert len(sessions) == 0 and len(sessions._late) <= 32


def test_deltas_are_joined_to_the_sample_that_they_are_of():
    draw = random.Random(0)
    length, cuts = 9, [0, 2, 2, 5, 9]
    whole = dict(
        token_ids=[draw.randrange(200) for _ in range(length)],
        logprobs=np.array([-draw.random() for _ in range(length)], np.float32),
        entropies=np.array([draw.random() for _ in range(length)], np.float32),
        top=(np.arange(2 * length, dtype=np.int32).reshape(-1, 2), np.ones((length, 2), np.float32)),
        support=[list(range(draw.randrange(3))) for _ in range(length)],
    )
    spans = [(0, 4, 1), (4, 9, 2)]

    def part(start, end):
        rows = whole["support"][start:end]
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        given = [VersionSpan(max(a, start), min(b, end), v, v) for a, b, v in spans if a < end and b > start]
        return CompletionOutput(
            index=0,
            text="x" * (end - start),
            token_ids=whole["token_ids"][start:end],
            logprobs=whole["logprobs"][start:end],
            top_logprobs=tuple(each[start:end] for each in whole["top"]),
            cumulative_logprob=float(whole["logprobs"][:end].sum()),
            kept_logprob_mass=None,
            finish_reason="stop" if end == length else None,
            stop_reason=None,
            version_spans=given,
            seed=5,
            support=(offsets, np.array([each for row in rows for each in row], np.int32)),
            entropies=whole["entropies"][start:end],
        )

    joined, expected = join_parts([part(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]), part(0, length)
    assert joined.token_ids == expected.token_ids and joined.text == expected.text
    assert joined.version_spans == expected.version_spans and joined.finish_reason == "stop"
    for name in ("logprobs", "entropies"):
        assert (getattr(joined, name) == getattr(expected, name)).all()
    for pair in ("top_logprobs", "support"):
        for one, other in zip(getattr(joined, pair), getattr(expected, pair), strict=True):
            assert (one == other).all() and one.dtype == other.dtype


def test_a_reward_of_a_row_makes_no_rows(talk, monkeypatch):
    talk.ask(HELLO, "one")
    talk.ask(HELLO, "two")
    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", lambda _: pytest.fail("rows of long sessions take long"))
        talk.session.set_reward(0.5, row=1)
    assert [row.reward for row in talk.session.rows()] == [None, 0.5]


def test_group_ids_fit_into_batches():
    sessions = Sessions(2, SessionLimits())
    for group_id in (1 << 62, -(1 << 63)):
        with pytest.raises(RequestError, match="group_id"):
            sessions.create(now=0.0, group_id=group_id)
    assert sessions.create(now=0.0, group_id=(1 << 62) - 1).group_id == (1 << 62) - 1


def test_a_session_that_is_deleted_while_late_ones_are_ended_is_no_error(monkeypatch):
    sessions = Sessions(2, SessionLimits())
    made = [sessions.create(now=0.0, seconds=1.0) for _ in range(2)]
    delete = Session.delete

    def delete_both(session):
        delete(session)
        for each in made:
            sessions._sessions.pop(each.id, None)  # as another thread does

    monkeypatch.setattr(Session, "delete", delete_both)
    assert set(sessions.end_late(10_000.0)) == {each.id for each in made}
