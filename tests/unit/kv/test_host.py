"""Blocks in this process's memory: those used last, within the bound."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.kv.host import ENTRY_BYTES, HostConnector
from tests.unit.kv.blocks import LAYOUT, data, key

SIZES = (1, 50, 100, 333)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "load", "drop", "fetch", "reset"]), st.integers(0, 11)), max_size=60
)


def size_of(number):
    return SIZES[number % len(SIZES)]


class SlowHost:
    """The truth: a list of blocks, the one used last at the end."""

    def __init__(self, max_bytes):
        self.max_bytes, self.order, self.fetched = max_bytes, [], set()

    def run(self, action, number):
        if action == "reset":
            self.order, self.fetched = [], set()
        elif action == "drop" and number in self.order:
            self.forget(number)
        elif action == "load" and number in self.order:
            if number not in self.fetched:
                self.use(number)
            self.fetched.discard(number)
        elif action == "fetch":
            for each in (number + 1, number):  # a fetch of two blocks
                if each in self.order:
                    self.use(each)
                    self.fetched.add(each)
        elif action == "save" and number not in self.order and size_of(number) + ENTRY_BYTES <= self.max_bytes:
            while self.num_bytes() + size_of(number) + ENTRY_BYTES > self.max_bytes:
                self.forget(self.order[0])
            self.order.append(number)

    def use(self, number):
        self.order.remove(number)
        self.order.append(number)

    def forget(self, number):
        self.order.remove(number)
        self.fetched.discard(number)

    def num_bytes(self):
        return sum(size_of(each) + ENTRY_BYTES for each in self.order)


@given(st.integers(200, 2500), ACTIONS)
def test_any_order_of_calls_holds_what_a_slow_model_holds(max_bytes, actions):
    host, truth = HostConnector("", max_bytes), SlowHost(max_bytes)
    host.open(LAYOUT)
    for action, number in actions:
        match action:
            case "save":
                host.save(key(number), data(number, size_of(number)))
            case "load":
                loaded = host.load(key(number))
                assert loaded is None or loaded == data(number, size_of(number))
            case "drop":
                host.drop([key(number)])
            case "fetch":
                assert host.fetch([key(number), key(number + 1)]) is None
            case "reset":
                host.reset()
        truth.run(action, number)
        assert [number for number in range(13) if host.holds(key(number))] == sorted(truth.order)
        stats = host.stats()
        assert (stats.num_blocks, stats.num_bytes) == (len(truth.order), truth.num_bytes())
        assert stats.num_bytes <= stats.max_bytes == max_bytes


def test_a_loaded_block_outlives_its_eviction_and_the_memory_of_its_save():
    host = HostConnector("", 1000)
    source = bytearray(data(0, 600))
    host.save(key(0), memoryview(source))
    source[:] = bytes(600)
    loaded = host.load(key(0))
    host.save(key(1), data(1, 600))
    assert not host.holds(key(0)) and host.stats().num_evicted == 1
    assert loaded == data(0, 600) and loaded.readonly


def test_the_end_of_a_fetched_chain_leaves_before_its_beginning():
    host = HostConnector("", 4 * (100 + ENTRY_BYTES))
    chain = [key(number) for number in range(4)]
    for number in range(4):
        host.save(key(number), data(number, 100))
    host.fetch(chain)
    assert all(host.load(each) is not None for each in chain)
    host.save(key(9), data(9, 100))
    assert [host.holds(each) for each in chain] == [True, True, True, False]


def test_a_block_above_the_bound_is_dropped_and_evicts_nothing():
    host = HostConnector("", 1000)
    host.save(key(0), data(0, 100))
    host.save(key(1), data(1, 1000))
    assert host.holds(key(0)) and not host.holds(key(1))
    assert (host.stats().num_dropped, host.stats().num_evicted) == (1, 0)


def test_threads_that_save_load_and_drop_find_right_bytes_within_the_bound():
    host = HostConnector("", 20_000)
    wrong = []

    def use(seed):
        for turn in range(400):
            number = (seed * 7 + turn * 13) % 40
            host.save(key(number), data(number, 900))
            loaded = host.load(key(number))
            if loaded is not None and loaded != data(number, 900):
                wrong.append(number)
            if turn % 11 == 0:
                host.drop([key(number)])

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = host.stats()
    assert not wrong and stats.num_bytes == stats.num_blocks * (900 + ENTRY_BYTES) <= 20_000
