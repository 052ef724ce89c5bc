"""What the scenarios share: clusters, replicas, and waiting for what has to come."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from rollout_engine import ConfigError, EngineConfig, EngineDeadError, LLMEngine, SamplingParams
from rollout_engine.fleet.ray.provider import RayProvider

SCENARIOS: dict[str, Callable[[EngineConfig], None]] = {}
SMALL = dict(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
OPTIONS = dict(num_kv_blocks=256, max_num_seqs=8, num_threads=1, skip_tokenizer_init=True, log_stats=False)
ENGINES = {}
"""Engines over clients, by address: one that is dropped leaves its core."""
_PATIENCE = 120


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@contextlib.contextmanager
def two_nodes(num_cpus=1):
    """A cluster that this program is on: a node of one CPU with it, another of `num_cpus`. Yields it and the other."""
    cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"num_cpus": 1})
    other_node = cluster.add_node(num_cpus=num_cpus, object_store_memory=80 << 20)
    ray.init(address=cluster.address)
    yield cluster, other_node
    ray.shutdown()
    cluster.shutdown()


def small_cluster():
    """The program's own cluster, which its scenarios share: it takes Ray ten seconds to start one."""
    if not ray.is_initialized():
        ray.init(**SMALL)


@contextlib.contextmanager
def provided(config, **options):
    """A provider with one replica, in a small cluster of the program's own. Afterwards the cluster is empty."""
    small_cluster()
    provider = RayProvider(**options)
    replica = provider.start(0, config)
    assert generated(replica.client)
    yield provider, replica
    replica.end()
    provider.shutdown()
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "neither actor nor placement group is left")
    expect_gone(replica.client)


def generated(client):
    """Generate greedily. Returns the token ids."""
    if client.address not in ENGINES:
        ENGINES[client.address] = LLMEngine.from_client(client)
    engine = ENGINES[client.address]
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return list(output.outputs[0].token_ids)
    raise AssertionError("no output")


def expect_death(replica):
    settle(lambda: replica.client.dead_error is not None, "the client sees it")
    refused(lambda: generated(replica.client), "core is gone", kind=EngineDeadError)
    expect_gone(replica.client)


def expect_gone(*clients):
    for client in clients:
        settle(lambda client=client: not lives(client.pid), f"core {client.pid} is gone")
        settle(lambda client=client: not Path(client.address).exists(), f"{client.address} is gone")
        settle(lambda client=client: not list(Path("/dev/shm").glob(f"{Path(client.address).name}*")), "memory is free")


def settle(is_so, what):
    """Wait until `is_so()`."""
    deadline = time.monotonic() + _PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"expected: {what}"
        time.sleep(0.05)


def refused(call, *words, kind=ConfigError):
    """Call it, and expect an error of that kind with these words."""
    error = attempt(call)
    assert type(error) is kind, repr(error)
    assert all(word in str(error) for word in words), str(error)


def attempt(call):
    try:
        return call()
    except Exception as error:
        return error


def changed(config, **options):
    return EngineConfig(**({name: getattr(config, name) for name in ("model", *OPTIONS)} | options))


def actors(state):
    return [actor for actor in ray._private.state.actors().values() if actor["State"] == state]


def groups(state):
    return [group for group in ray.util.placement_group_table().values() if group["state"] == state]


def actor_pid(replica):
    """The process that started the replica's core."""
    return psutil.Process(replica.client.pid).ppid()


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def node_name():
    return ray.nodes()[0]["NodeName"]
