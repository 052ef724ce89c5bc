"""Blocks of KV in a Ray cluster: found by other engines while the engine that saved them lives."""

import contextlib
import os
import subprocess
import sys

import ray

from rollout_engine.kv.tiers import make_connector
from tests.ray.block_holder import SPEC, connect, save
from tests.ray.running import refused, scenario, settle, small_cluster, two_nodes
from tests.unit.kv.blocks import LAYOUT, data, key


@contextlib.contextmanager
def holder(first, last):
    """Another process with these blocks."""
    command = [sys.executable, "-m", "tests.ray.block_holder", str(first), str(last)]
    variables = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("saved"):
                    break
            else:
                raise AssertionError("the other process has saved nothing")
            yield process
        finally:
            process.kill()


def fetch(connector, *numbers):
    """Blocks that are found, by number."""
    wait = connector.fetch([key(number) for number in numbers])
    assert wait is None or wait(60)
    loaded = {number: connector.load(key(number)) for number in numbers}
    assert all(found is None or found == data(number) for number, found in loaded.items())
    return [number for number, found in loaded.items() if found is not None]


@scenario
def blocks_are_found_by_other_engines_until_their_engine_ends(config):
    small_cluster()
    mine = connect()
    save(mine, 0, 1)
    assert fetch(mine, 0, 1, 2) == [0, 1] and mine.holds(key(0)) and not mine.holds(key(2))
    with holder(1, 5) as other:
        assert mine.load(key(3)) is None  # not fetched
        assert fetch(mine, 0, 1, 2, 3, 4, 5) == [0, 1, 2, 3, 4]
        save(mine, 2)
        assert mine.stats().num_blocks == 2, "another engine has it"
        mine.drop([key(0)])
        save(mine)  # waits for it
        assert fetch(mine, 0) == []
        other.kill()
        other.wait()
        settle(lambda: fetch(mine, 2, 3) == [], "its blocks are gone")
    save(mine, 2)
    assert fetch(mine, 1, 2) == [1, 2]
    mine.reset()
    save(mine)
    assert fetch(mine, 1, 2) == []
    mine.close()


@scenario
def the_index_is_made_again_when_the_engine_that_made_it_is_killed(config):
    small_cluster()
    with holder(0, 3) as first:
        mine = connect()
        save(mine, 7)
        assert fetch(mine, 0, 7) == [0, 7]
        first.kill()
        first.wait()
        settle(lambda: fetch(mine, 1) == [], "its blocks are gone")
        assert fetch(mine, 7) == [7]
        settle(lambda: (save(mine, 8), fetch(mine, 8))[1] == [8], "blocks are saved again")
        with holder(10, 12):
            assert fetch(mine, 7, 8, 10, 11) == [7, 8, 10, 11]
    mine.close()


@scenario
def an_engine_keeps_its_own_bound(config):
    small_cluster()
    mine = connect(max_bytes=3 * 4300)
    save(mine, *range(20, 25))
    assert fetch(mine, *range(20, 25)) == [22, 23, 24]
    stats = mine.stats()
    assert stats.num_evicted == 2 and stats.num_bytes <= stats.max_bytes
    mine.close()


@scenario
def a_connector_without_its_cluster_is_a_miss(config):
    small_cluster()
    mine = connect()
    save(mine, 0)
    ray.shutdown()
    assert mine.load(key(0)) is None and mine.fetch([key(1)]) is None
    mine.save(key(1), data(1))
    mine.close()
    assert not ray.is_initialized()


@scenario
def a_cluster_that_is_none_is_refused(config):
    refused(lambda: make_connector(f"{SPEC}:127.0.0.1:1").open(LAYOUT), "127.0.0.1:1", "ray start --head")


@scenario
def blocks_cross_from_node_to_node(config):
    with two_nodes() as (_, other_node):
        mine = connect()

        @ray.remote(num_cpus=1)
        class Far:
            def save(self):
                self.connector = connect()
                save(self.connector, 3, 4)
                return ray.get_runtime_context().get_node_id()

        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(other_node.node_id, soft=False)
        far = Far.options(scheduling_strategy=on_node).remote()
        assert ray.get(far.save.remote()) == other_node.node_id != mine._inner._cluster.node_id
        assert fetch(mine, 3, 4, 5) == [3, 4]
        ray.kill(far)
        mine.close()
