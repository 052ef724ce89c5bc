"""Messages that wait for the busy loop: each client's in order, one client after the other, none without bounds."""

import queue

import pytest

from rollout_engine.process.inbox import MAX_BYTES, MAX_MESSAGES, ClientLeft, FromClient, Inbox, Stop, Wake


def take_all(inbox):
    return [inbox.get() for _ in range(inbox.qsize())]


def test_clients_have_turns_and_each_its_own_order():
    inbox = Inbox()
    for number in range(5):
        inbox.put(FromClient(0, number))
    inbox.put(FromClient(1, "a"))
    inbox.put(FromClient(2, "x"))
    inbox.put(ClientLeft(2))
    taken = take_all(inbox)
    assert taken[:3] == [FromClient(0, 0), FromClient(1, "a"), FromClient(2, "x")]
    assert taken[3:] == [FromClient(0, 1), ClientLeft(2), FromClient(0, 2), FromClient(0, 3), FromClient(0, 4)]


def test_a_client_that_comes_while_another_floods_waits_for_one_message_of_it():
    inbox = Inbox()
    for number in range(100):
        inbox.put(FromClient(0, number))
    inbox.get()
    inbox.put(FromClient(1, "a"))
    assert FromClient(1, "a") in (inbox.get(), inbox.get())


def test_what_is_urgent_comes_before_every_client():
    inbox = Inbox()
    inbox.put(FromClient(0, "a"))
    inbox.put_first(Wake())
    inbox.put_first(Stop("enough"))
    assert take_all(inbox) == [Wake(), Stop("enough"), FromClient(0, "a")]
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.0)


@pytest.mark.parametrize(("count", "num_bytes"), [(MAX_MESSAGES, 1), (4, MAX_BYTES // 4)])
def test_it_is_full_from_the_bound_of_one_client_until_that_one_is_below_it(count, num_bytes):
    inbox = Inbox()
    inbox.put(FromClient(1, "another's"), num_bytes)
    for number in range(count):
        assert not inbox.is_full
        inbox.put(FromClient(0, number), num_bytes)
    assert inbox.is_full
    assert inbox.get().client_index == 1 and inbox.is_full
    assert inbox.get().client_index == 0 and not inbox.is_full
