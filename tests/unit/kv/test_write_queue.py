"""Writes that wait: found by their key, carried out in order, and dropped if too many wait."""

import threading

import pytest

from rollout_engine.kv.write_queue import WriteQueue
from tests.unit.kv.blocks import data, key


class SlowStore:
    """A store whose calls wait for permission."""

    def __init__(self):
        self.may_run = threading.Semaphore(0)
        self.stored, self.calls = {}, []

    def write(self, key, data):
        self.may_run.acquire()
        if data == b"fails":
            raise OSError("no")
        self.calls.append(("write", key))
        self.stored[key] = data
        return True

    def remove(self, key):
        self.may_run.acquire()
        self.calls.append(("remove", key))
        self.stored.pop(key, None)

    def clear(self):
        self.may_run.acquire()
        self.calls.append("clear")
        self.stored.clear()

    def permit(self, count=1_000):
        self.may_run.release(count)


@pytest.fixture
def store():
    return SlowStore()


@pytest.fixture
def queue(store):
    queue = WriteQueue(
        store, 10_000, lambda num_bytes: None, lambda problem, is_write: store.calls.append(str(problem))
    )
    yield queue
    store.permit()
    assert queue.close()


def test_a_block_that_waits_is_found_and_then_stored(store, queue):
    source = bytearray(data(0))
    assert queue.save(key(0), memoryview(source)) and queue.save(key(0), memoryview(source))
    source[:] = bytes(len(source))
    assert queue.find(key(0)) == data(0) and not queue.hides(key(0))
    store.permit()
    assert queue.wait_until_empty(60) and queue.find(key(0)) is None
    assert store.stored == {key(0): data(0)} and len(store.calls) == 1


def test_a_full_queue_takes_no_more_until_it_is_written(store, queue):
    assert queue.save(key(0), data(0, 50_000))  # one alone always has room
    assert not queue.save(key(1), data(1, 1))
    store.permit()
    assert queue.wait_until_empty(60)
    assert [queue.save(key(number), data(number)) for number in range(2)] == [True, True]


def test_what_is_dropped_is_hidden_at_once_and_may_be_saved_again(store, queue):
    store.stored[key(0)] = data(0)
    queue.save(key(0), data(0))
    queue.drop([key(0)])
    assert queue.find(key(0)) is None and queue.hides(key(0))
    queue.save(key(0), data(0))
    assert queue.find(key(0)) == data(0)
    store.permit()
    assert queue.wait_until_empty(60)
    assert store.stored == {key(0): data(0)} and not queue.hides(key(0))


def test_all_is_hidden_while_a_clearing_waits_but_for_later_writes(store, queue):
    store.stored[key(0)] = data(0)
    queue.save(key(1), data(1))
    queue.clear()
    queue.save(key(2), data(2))
    assert queue.hides(key(0)) and queue.find(key(1)) is None and queue.find(key(2)) == data(2)
    store.permit()
    assert queue.wait_until_empty(60)
    assert store.stored == {key(2): data(2)} and not queue.hides(key(0))


def test_a_fault_is_reported_and_the_thread_lives(store, queue):
    store.permit()
    queue.save(key(0), memoryview(b"fails"))
    queue.save(key(1), data(1))
    assert queue.wait_until_empty(60)
    assert store.calls == ["no", ("write", key(1))]
    assert not queue.find(key(0))


def test_a_closed_queue_has_written_all_and_takes_nothing(store, queue):
    for number in range(2):
        queue.save(key(number), data(number))
    store.permit()
    assert queue.close()
    assert set(store.stored) == {key(0), key(1)}
    assert not queue.save(key(2), data(2))
