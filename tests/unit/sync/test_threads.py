"""Work on several threads: results in order, the largest items first, errors not lost."""

import pytest

from sync.threads import in_threads


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_the_order_of_the_items(num_threads):
    assert in_threads(lambda x: x * x, range(50), num_threads) == [x * x for x in range(50)]
    assert in_threads(lambda x: x * x, range(50), num_threads, sizes=list(range(50))) == [x * x for x in range(50)]


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
