"""Blocks that are brought near: in order, within the bound, and gone once they are forgotten."""

import threading

import pytest

from rollout_engine.kv import fetcher as module
from rollout_engine.kv.fetcher import STEP_NS, Fetcher
from tests.unit.kv.blocks import data, key


class Reader:
    """Blocks 0 to 9, each read once it is permitted."""

    def __init__(self):
        self.stored = {key(number): data(number, 1000) for number in range(10)}
        self.times, self.began, self.may_read = [], threading.Event(), threading.Event()
        self.may_read.set()

    def read(self, key, used_ns):
        self.began.set()
        assert self.may_read.wait(60)
        self.times.append(used_ns)
        return self.stored.get(key)


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def fetcher(reader):
    fetcher = Fetcher(reader.read, 4000)
    yield fetcher
    assert fetcher.close()


def keys(*numbers):
    return [key(number) for number in numbers]


def near(fetcher):
    return [number for number in range(10) if fetcher.has(key(number))]


def test_blocks_are_near_once_the_wait_is_over_and_are_taken_once(fetcher, reader):
    reader.may_read.clear()
    wait = fetcher.begin(keys(0, 77, 1))
    assert not wait(0.0)
    reader.may_read.set()
    assert wait(60) and wait(0.0)
    assert [time - reader.times[0] for time in reader.times] == [0, -STEP_NS, -2 * STEP_NS]
    assert near(fetcher) == [0, 1]
    assert fetcher.take(key(0)) == data(0, 1000) and fetcher.take(key(0)) is None
    assert fetcher.take(key(77)) is None


def test_a_fetch_ends_when_its_own_blocks_would_not_fit(fetcher):
    assert fetcher.begin(keys(*range(10)))(60)
    assert near(fetcher) == [0, 1, 2, 3]


def test_blocks_that_no_caller_takes_leave_for_others(fetcher):
    assert fetcher.begin(keys(0, 1, 2))(60) and fetcher.begin(keys(3, 4))(60)
    assert near(fetcher) == [1, 2, 3, 4]


def test_blocks_that_wait_for_long_leave_at_the_next_fetch(fetcher, monkeypatch):
    assert fetcher.begin(keys(0, 1))(60)
    monkeypatch.setattr(module, "_KEPT_SECONDS", 0.0)
    assert fetcher.begin(keys(2))(60)
    assert near(fetcher) == [2]


def test_a_block_that_is_read_while_it_is_forgotten_is_not_kept(fetcher, reader):
    reader.may_read.clear()
    wait = fetcher.begin(keys(0, 1))
    assert reader.began.wait(60)
    fetcher.forget()
    reader.may_read.set()
    assert wait(60) and near(fetcher) == [1]
    fetcher.forget(keys(1))
    assert near(fetcher) == []


def test_a_close_ends_all_waits(fetcher, reader):
    reader.may_read.clear()
    waits = [fetcher.begin(keys(number)) for number in range(3)]
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    reader.may_read.set()
    assert all(wait(60) for wait in waits)
    closing.join()
    assert fetcher.begin(keys(0))(0.0) and near(fetcher) == []
