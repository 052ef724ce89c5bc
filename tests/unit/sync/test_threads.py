"""Work in threads is complete, in order, or an error."""

import threading

import pytest

from sync.threads import in_threads


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_are_in_order(num_threads):
    assert in_threads(lambda i: i * i, range(1000), num_threads) == [i * i for i in range(1000)]
    assert in_threads(str, [], num_threads) == []


def test_threads_work_at_the_same_time():
    meeting = threading.Barrier(3, timeout=10)
    assert in_threads(lambda i: meeting.wait() >= 0, range(3), 3) == [True] * 3


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("bad", [0, 50, 99])
def test_the_first_error_is_raised_and_ends_the_work(num_threads, bad):
    done = []

    def work(i):
        if i == bad:
            raise ValueError("bad")
        done.append(i)

    with pytest.raises(ValueError, match="bad"):
        in_threads(work, range(100), num_threads)
    assert len(done) < 100
