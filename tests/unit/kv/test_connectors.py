"""Every connector of the library: nothing but a hit or a miss ever results."""

import os
import random
import threading

import msgspec

from rollout_engine.kv.connector import KVConnectorStats, KVLayout
from tests.unit.kv.blocks import LAYOUT, data, key


def settle(connector):
    if hasattr(connector, "wait_until_written"):
        assert connector.wait_until_written(60)


def test_a_block_is_found_as_it_was_saved(connector):
    source = bytearray(data(0))
    assert not connector.holds(key(0)) and connector.load(key(0)) is None
    connector.save(key(0), memoryview(source))
    source[:] = bytes(len(source))
    for _ in range(2):
        assert connector.holds(key(0))
        loaded = connector.load(key(0))
        assert loaded == data(0) and loaded.readonly and loaded.format == "B" and loaded.contiguous
        settle(connector)
    stats = connector.stats()
    assert (stats.num_saved, stats.num_saved_bytes, stats.num_loaded, stats.num_loaded_bytes) == (1, 4096, 2, 8192)
    assert (stats.num_misses, stats.num_blocks, stats.num_refused, stats.num_dropped) == (1, 1, 0, 0)
    assert 4096 < stats.num_bytes < 5000 and stats.max_bytes == 1 << 24
    assert type(stats) is KVConnectorStats and min(msgspec.structs.astuple(stats)) >= 0


def test_blocks_that_were_fetched_are_loaded_without_another_wait(connector):
    for number in range(100):
        connector.save(key(number), data(number))
    settle(connector)
    wait = connector.fetch([key(number) for number in range(200)])
    assert wait is None or (wait(60) and wait(0.0))
    assert all(connector.load(key(number)) == data(number) for number in range(100))
    assert all(connector.load(key(number)) is None for number in range(100, 200))


def test_a_fetch_of_blocks_that_are_nowhere_waits_for_nothing(connector):
    assert connector.fetch([key(number) for number in range(9)]) is None
    assert connector.fetch([]) is None
    connector.save(key(0), data(0))
    assert connector.fetch([key(0)]) is None or connector.load(key(0)) == data(0)


def test_what_is_dropped_or_reset_is_gone_at_once_and_may_come_again(connector):
    for number in range(4):
        connector.save(key(number), data(number))
    connector.drop([key(0), key(77)])
    assert not connector.holds(key(0)) and connector.load(key(0)) is None and connector.load(key(1)) == data(1)
    settle(connector)
    connector.fetch([key(1), key(2)])
    connector.reset()
    assert not any(connector.holds(key(number)) or connector.load(key(number)) for number in range(4))
    connector.save(key(1), data(1))
    assert connector.load(key(1)) == data(1)
    settle(connector)
    assert [number for number in range(4) if connector.holds(key(number))] == [1]
    assert connector.load(key(1)) == data(1) and connector.stats().num_blocks == 1


def test_a_closed_connector_finds_nothing_and_takes_nothing(connector):
    connector.save(key(0), data(0))
    connector.close()
    connector.close()
    assert not connector.holds(key(0)) and connector.load(key(0)) is None and connector.fetch([key(0)]) is None
    connector.drop([key(0)])
    connector.reset()
    assert connector.stats().num_saved == 1


def test_a_block_above_the_bound_is_dropped(connect, memory):
    for spec in ("host", "shm", f"disk:{memory / 'disk'}"):
        small = connect(spec, max_bytes=5000)
        small.save(key(0), data(0, 6000))
        settle(small)
        assert small.load(key(0)) is None and small.stats().num_dropped == 1


def test_threads_that_save_fetch_load_and_drop_get_right_bytes_or_none(connect, memory):
    for spec in ("host", "shm", f"disk:{memory / 'disk'}"):
        shared, wrong = connect(spec, max_bytes=100_000), []

        def use(seed, shared=shared, wrong=wrong):
            choice = random.Random(seed)
            for _ in range(150):
                number = choice.randrange(40)
                match choice.randrange(4):
                    case 0 | 1:
                        shared.save(key(number), data(number, 4000))
                    case 2:
                        wait = shared.fetch([key(each) for each in range(number, number + 5)])
                        if wait is not None and choice.random() < 0.5:
                            wait(60)
                    case 3 if choice.random() < 0.2:
                        shared.drop([key(number)])
                loaded = shared.load(key(number))
                if loaded is not None and loaded != data(number, 4000):
                    wrong.append(number)

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settle(shared)
        assert not wrong and shared.stats().num_bytes <= 100_000 and shared.stats().num_refused == 0


def test_ten_thousand_lookups_under_changing_layouts_find_nothing_stale(connect, memory):
    choice = random.Random(3)
    layouts = [LAYOUT, *(msgspec.structs.replace(LAYOUT, **{name: value}) for name, value in CHANGES.items())]
    assert len({layout.namespace for layout in layouts}) == len(layouts)
    for spec in ("shm", f"disk:{memory / 'disk'}"):
        engines = [connect(spec, layout=layout) for layout in layouts]
        saved = set()
        for turn in range(5_000):
            which, number = choice.randrange(len(layouts)), choice.randrange(60)
            loaded = engines[which].load(key(number))
            if loaded is None:
                assert (which, number) not in saved
                engines[which].save(key(number), data((which, number).__repr__(), 64))
                saved.add((which, number))
            else:
                assert (which, number) in saved and loaded == data((which, number).__repr__(), 64)
            if turn % 500 == 499:
                engines[which].reset()
                saved = {(other, each) for other, each in saved if other != which}


CHANGES = dict(
    model="tiny, 3 layers",
    dtype="float32",
    block_size=32,
    block_bytes=8192,
    state_bytes=1,
    made_with="cuda",
    pool="b",
)


def test_a_layout_has_the_same_namespace_in_every_process():
    assert LAYOUT.namespace == "27d9635f11272467639e0291900f68a6"
    assert KVLayout(model="a", dtype="b", block_size=1, block_bytes=1).namespace != LAYOUT.namespace


def test_shared_memory_is_one_for_all_engines_until_the_last_of_them_closes(connect, memory):
    first, second = connect("shm"), connect("shm")
    first.save(key(0), data(0))
    settle(first)
    assert second.holds(key(0)) and second.load(key(0)) == data(0)
    first.close()
    assert second.load(key(0)) == data(0)
    second.close()
    assert not connect("shm").holds(key(0))
    (directory,) = os.listdir(memory)
    assert directory == f"rollout_kv_{os.geteuid()}"


def test_a_directory_on_disk_is_found_again(connect, tmp_path):
    first = connect(f"disk:{tmp_path / 'kv'}")
    first.save(key(0), data(0))
    first.close()  # writes what waits
    assert connect(f"disk:{tmp_path / 'kv'}").load(key(0)) == data(0)
