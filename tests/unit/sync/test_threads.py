"""Work on several threads: results in order, the largest items first, errors not lost."""

import threading

import pytest

from sync.errors import SyncError
from sync.threads import in_threads


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_the_order_of_the_items(num_threads):
    assert in_threads(lambda x: x * x, range(50), num_threads) == [x * x for x in range(50)]
    assert in_threads(lambda x: x * x, range(50), num_threads, sizes=list(range(50))) == [x * x for x in range(50)]


def test_no_more_threads_begin_than_there_are_items():
    names = in_threads(lambda _: threading.current_thread().name, range(3), 1_024)
    assert len(set(names)) <= 3
    before = threading.active_count()
    assert in_threads(lambda _: threading.active_count(), [0], 1_024) == [before]


@pytest.mark.parametrize("num_threads", [0, -1, 1_025, 100_000, 2.0, "3", True])
def test_an_absurd_number_of_threads_is_refused(num_threads):
    with pytest.raises(SyncError, match=r"num_threads=.* is not allowed: must be an int in \[1, 1024\]"):
        in_threads(lambda x: x, range(3), num_threads)


def test_the_largest_begin_first():
    begun = []
    in_threads(begun.append, "abcd", 1, sizes=[2, 7, 1, 7])
    assert begun == ["b", "d", "a", "c"]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_ends_it_all(num_threads):
    done = []

    def work(i):
        if i == 5:
            raise KeyError("five")
        done.append(i)

    with pytest.raises(KeyError, match="five"):
        in_threads(work, range(10_000), num_threads)
    assert len(done) < 10_000


def test_where_no_thread_can_start_the_caller_does_the_work(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert in_threads(abs, range(-5, 0), 4) == [5, 4, 3, 2, 1]
