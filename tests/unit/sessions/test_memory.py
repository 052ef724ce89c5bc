"""The memory of sessions: all that one keeps is counted, in its own bound and in that of all together."""

import random

import pytest

from rollout_engine.base.errors import RetryableError
from rollout_engine.sessions.errors import SessionEndedError
from rollout_engine.sessions.known_responses import KnownResponses
from rollout_engine.sessions.limits import SessionLimits
from rollout_engine.sessions.memory import BYTES_OF_ID, Memory, bytes_of_value
from rollout_engine.sessions.registry import Sessions
from rollout_engine.sessions.session import Session

HELLO = [{"role": "user", "content": "hello"}]


def test_bytes_count_in_the_total_until_their_holder_is_closed():
    total = Memory(100)
    first, second = Memory(60, total), Memory(60, total)
    assert first.take(50) is None and second.take(50) is None
    assert first.take(11) is first and second.take(1) is total
    assert (first.num_bytes, total.num_bytes, first.full, total.full) == (50, 100, total, total)
    first.add(30)
    assert first.full is first and total.num_bytes == 130
    first.close()
    first.close()
    first.add(7)
    assert first.take(7) is None
    assert (first.num_bytes, total.num_bytes, second.full) == (0, 50, None)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_taken_is_given_back(seed):
    draw, total = random.Random(seed), Memory(5_000)
    holders = [Memory(draw.randrange(500, 3_000), total) for _ in range(4)]
    held = [0] * 4
    for _ in range(400):
        index = draw.randrange(4)
        if draw.random() < 0.6:
            size = draw.randrange(300)
            full = holders[index].take(size)
            fits = held[index] + size <= holders[index].most and sum(held) + size <= total.most
            assert (full is None) == fits
            held[index] += size if full is None else 0
        elif held[index]:
            size = draw.randrange(held[index])
            holders[index].add(-size)
            held[index] -= size
        assert [each.num_bytes for each in holders] == held and total.num_bytes == sum(held)


def test_a_value_takes_at_least_its_text():
    assert bytes_of_value({"a": ["x" * 1_000, 1, None]}) > 1_000
    assert bytes_of_value([[]] * 100) > 1_000


def test_every_row_is_counted_with_the_ids_of_its_whole_prompt(new_talk):
    talk = new_talk(num_bytes=400_000)
    messages = talk.ask([{"role": "user", "content": "x" * 2_000}], "ab")
    asked, before = [*messages, HELLO[0]], talk.session.num_bytes
    with pytest.raises(SessionEndedError, match="400000 bytes") as problem:
        for number in range(100):
            talk.ask(asked, f"answer {number}")
    assert "session_bytes" in str(problem.value) and "rows stay readable" in str(problem.value)
    rows = talk.session.rows()
    num_ids = sum(len(row.prompt_token_ids) + 3 * len(row.response) for row in rows)
    assert 5 < len(rows) < 60 and 8 * num_ids < talk.session.num_bytes <= 400_000
    assert talk.session.num_bytes - before >= 8 * 2_000 * (len(rows) - 1)


def test_a_request_that_runs_is_counted_and_leaves_nothing(talk):
    before = talk.session.num_bytes
    places = [talk.place([{"role": "user", "content": "y" * 300}]) for _ in range(3)]
    assert talk.session.num_bytes - before >= 3 * 300 * BYTES_OF_ID
    for place in places:
        talk.session.cancel(place)
        talk.session.cancel(place)
    assert talk.session.num_bytes == before
    first = talk.place(HELLO)
    talk.answer(first, "hi")
    talk.session.cancel(first)
    held = talk.session.num_bytes
    talk.session.cancel(talk.place(HELLO))
    assert talk.session.num_bytes == held > 0


def test_sessions_together_have_one_budget():
    sessions = Sessions(8, SessionLimits(num_bytes=10_000), most_bytes=15_000)
    first, second = (sessions.create(now=0.0) for _ in range(2))
    first.memory.add(9_000)
    assert second.memory.take(7_000) is sessions.memory
    second.memory.add(6_000)
    with pytest.raises(RetryableError, match="all_sessions_bytes=15000.*DELETE"):
        sessions.create(now=0.0)
    assert sessions.num_refused == {"all bytes": 1}
    sessions.delete(first.id)
    first.memory.add(5_000)
    assert sessions.memory.num_bytes == 6_000 and sessions.create(now=0.0)


def test_a_full_total_refuses_requests_for_now(new_talk):
    talk, refused = new_talk(), []
    total = Memory(1_000)
    talk.session = Session("s", "key", limits=SessionLimits(), now=0.0, total=total, on_refuse=refused.append)
    with pytest.raises(RetryableError, match="all_sessions_bytes=1000"):
        talk.place([{"role": "user", "content": "z" * 100}])
    assert total.num_bytes == 0 and talk.session.num_open == 0
    total.add(1_000)
    with pytest.raises(RetryableError):
        talk.place(HELLO)
    assert refused == ["all bytes"] * 2 and talk.session.ended_by(1.0) is None


def test_known_responses_count_and_are_given_back():
    memory = Memory(10_000)
    known = KnownResponses(most_bytes=3_000, memory=memory)
    for number in range(50):
        known.add(str(number), [], [{"role": "user", "content": "x" * 500}])
        assert 500 <= memory.num_bytes <= 3_000
    assert 1 < len(known) < 6
    known.add("long", [], ["x" * 5_000])
    assert len(known) == 0 and memory.num_bytes == 0
