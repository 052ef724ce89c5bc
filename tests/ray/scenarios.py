"""Programs over a `RayProvider`: ``python -m tests.ray.scenarios CHECKPOINT NAME...``. Asserting is how one fails."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

from rollout_engine import ConfigError, EngineConfig, EngineDeadError, LLMEngine, RetryableError, SamplingParams
from rollout_engine.fleet.ray_provider import RayProvider
from tests.faults.slow_start import BEGUN

SCENARIOS: dict[str, Callable[[EngineConfig], None]] = {}
SMALL = dict(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
ENGINES = {}
"""Engines over clients, by address: one that is dropped leaves its core."""
_PATIENCE = 60


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@scenario
def two_replicas_start_at_once_and_compute_the_same(config):
    provider = RayProvider()
    provider.check(2, config)
    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda index: provider.start(index, config), range(2)))
    clients = [replica.client for replica in replicas]
    assert len({client.pid for client in clients}) == len({client.address for client in clients}) == 2
    assert generated(clients[0]) == generated(clients[1])
    assert len(actors("ALIVE")) == len(groups("CREATED")) == 2
    replicas[0].end()
    replicas[0].end()
    settle(lambda: len(actors("ALIVE")) == len(groups("CREATED")) == 1, "an ended replica leaves its place")
    assert generated(clients[1]), "the other one serves on"
    provider.shutdown()
    provider.shutdown()
    assert not ray.is_initialized()
    expect_gone(*clients)


@scenario
def an_actor_that_is_killed_takes_its_core_with_it(config):
    with provided(config) as (provider, replica):
        os.kill(actor_pid(replica), signal.SIGKILL)
        expect_death(replica)
        settle(lambda: not groups("CREATED"), "its room is free again, without anybody's call")
        again = provider.start(0, config)
        assert generated(again.client)


@scenario
def an_actor_that_is_killed_takes_a_stopped_core_with_it(config):
    with provided(config) as (_, replica):
        os.kill(replica.client.pid, signal.SIGSTOP)
        os.kill(actor_pid(replica), signal.SIGKILL)
        expect_death(replica)


@scenario
def a_core_that_is_killed_is_noticed_and_another_takes_its_place(config):
    with provided(config) as (provider, replica):
        os.kill(replica.client.pid, signal.SIGKILL)
        settle(lambda: replica.client.dead_error is not None, "the client sees it")
        replica.end(kill=True)
        expect_gone(replica.client)
        assert generated(provider.start(0, config).client)


@scenario
def a_core_that_hangs_is_noticed_and_ended(config):
    with provided(config, hang_seconds=1.5) as (_, replica):
        os.kill(replica.client.pid, signal.SIGSTOP)
        settle(lambda: replica.client.dead_error is not None, "the hang is noticed")
        replica.end(kill=True)
        expect_gone(replica.client)


@scenario
def an_actor_that_hangs_does_not_keep_its_replica(config):
    with provided(config) as (_, replica):
        os.kill(actor_pid(replica), signal.SIGSTOP)
        assert generated(replica.client), "its core serves on"
        replica.end()
        expect_gone(replica.client)
        settle(lambda: not groups("CREATED"), "its room is free")


@scenario
def what_does_not_fit_is_refused(config):
    small_cluster()
    provider = RayProvider(start_seconds=120)
    refused(lambda: provider.check(3), "num_replicas=3", "Asked: 1 CPU", "Free:", "2 CPU", "room for 2", node_name())
    refused(lambda: provider.check(1, changed(config, device="cuda")), "Asked: 1 CPU, 1 GPU", "2 CPU, 0 GPU")
    refused(lambda: provider.start(0, changed(config, num_threads=3)), "Asked: 3 CPU", "room for 0 even in an idle")
    first = provider.start(0, changed(config, num_threads=2))
    refused(lambda: provider.start(1, changed(config, num_threads=2)), "num_replicas=2", "room for 1 even in an idle")
    impatient, other = RayProvider(start_seconds=2), RayProvider()
    refused(lambda: impatient.start(0, config), "Free:", "0 CPU", "within 2 s", kind=RetryableError)
    assert len(groups("CREATED")) == 1, "what was refused holds no place"
    provider.shutdown()
    settle(lambda: not groups("CREATED"), "its room is free")
    assert generated(other.start(0, config).client), "there is room now"
    assert first.client.dead_error is not None
    other.shutdown()
    impatient.shutdown()
    assert ray.is_initialized(), "the program's own connection is left alone"


@scenario
def a_start_that_fails_leaves_nothing(config):
    slow, _ = slow_to_load(config)
    small_cluster()
    provider = RayProvider()
    refused(lambda: provider.start(0, changed(config, model=f"{config.model}/absent")), "absent")
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left of it")
    impatient = RayProvider(start_seconds=15)
    refused(lambda: impatient.start(0, slow), "not ready within", kind=EngineDeadError)
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left of it")
    assert generated(provider.start(0, config).client), "the cluster is as good as before"
    provider.shutdown()


@scenario
def a_shutdown_ends_what_is_starting(config):
    slow, begun = slow_to_load(config)
    small_cluster()
    provider = RayProvider()
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(provider.start, 0, slow)
        settle(begun.exists, "it is loading")
        provider.shutdown()
        refused(start.result, kind=EngineDeadError)
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left of it")


@scenario
def a_node_that_cannot_import_the_library_is_told_so(config):
    lacking = Path(os.environ["TMPDIR"]).with_name("lacking")
    lacking.mkdir()
    (lacking / "sitecustomize.py").write_text("import sys; sys.modules['rollout_engine'] = None")
    ray.init(**SMALL, runtime_env={"env_vars": {"PYTHONPATH": str(lacking)}})
    provider = RayProvider()
    refused(lambda: provider.start(0, config), "import of rollout_engine halted", "on every node")
    provider.shutdown()
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left of it")


@scenario
def two_providers_share_a_connection(config):
    one, two = RayProvider(), RayProvider()
    replicas = [one.start(0, config), two.start(0, config)]
    one.shutdown()
    assert generated(replicas[1].client), "the other provider's replica serves on"
    two.shutdown()
    assert not ray.is_initialized()
    expect_gone(*(replica.client for replica in replicas))


@scenario
def addresses_of_no_cluster_are_refused(config):
    refused(lambda: RayProvider("127.0.0.1:1"), "127.0.0.1:1", "ray start --head")
    refused(lambda: RayProvider("nonsense"), "'nonsense'", "HOST:PORT")
    refused(lambda: RayProvider("ray://127.0.0.1:10001"), "ray://", "on one of its nodes")
    assert not ray.is_initialized()
    small_cluster()
    refused(lambda: RayProvider("127.0.0.1:1"), "is connected to the Ray cluster at")
    provider = RayProvider(ray.get_runtime_context().gcs_address)
    provider.shutdown()
    assert ray.is_initialized()


@scenario
def a_replica_on_another_node_is_reached_by_tcp_until_the_node_dies(config):
    cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"num_cpus": 1})
    other_node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address)
    provider = RayProvider(cluster.address)
    provider.check(2, config)
    replicas = [provider.start(index, config) for index in range(2)]
    here, far = sorted(replicas, key=lambda replica: replica.client.address.startswith("tcp://"))
    assert far.client.address.startswith("tcp://") and Path(here.client.address).is_dir()
    assert here.node != far.node
    assert generated(here.client) == generated(far.client)
    cluster.remove_node(other_node, allow_graceful=False)
    settle(lambda: far.client.dead_error is not None, "the client sees it")
    settle(lambda: not lives(far.client.pid), "the core ended with its node")
    far.end(kill=True)
    assert generated(here.client), "the other one serves on"
    provider.shutdown()
    expect_gone(here.client)
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left")
    ray.shutdown()
    cluster.shutdown()


@scenario
def a_program_that_waits_to_be_killed(config):
    provider = RayProvider()
    replica = provider.start(0, config)
    print(f"pids {replica.client.pid} {actor_pid(replica)}", flush=True)
    threading.Event().wait()


def slow_to_load(config):
    """A configuration of a core that stays in the middle of its start. Returns it, and a file that tells when."""
    begun = Path(os.environ[BEGUN])
    begun.unlink(missing_ok=True)
    return changed(config, logits_processors=("tests.faults.slow_start:Slow",)), begun


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


OPTIONS = dict(num_kv_blocks=256, max_num_seqs=8, num_threads=1, skip_tokenizer_init=True, log_stats=False)


def main():
    torch.set_num_threads(1)
    checkpoint, *names = sys.argv[1:]
    for name in names:
        print("begin", name, flush=True)
        SCENARIOS[name](EngineConfig(model=checkpoint, **OPTIONS))


if __name__ == "__main__":
    main()
