"""Replicas of a provider that do not fit, fail to start, or are given up while they start."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import ray

from rollout_engine import EngineDeadError, RetryableError
from rollout_engine.fleet.ray import provider as ray_provider
from rollout_engine.fleet.ray.provider import RayProvider
from rollout_engine.process.core_launcher import config_digest
from tests.faults.slow_start import BEGUN
from tests.ray.running import (
    SMALL,
    actors,
    changed,
    expect_gone,
    generated,
    groups,
    node_name,
    refused,
    scenario,
    settle,
    small_cluster,
)


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
def a_core_of_another_configuration_is_refused(config):
    small_cluster()
    provider = RayProvider()
    with mock.patch.object(ray_provider, "config_digest", lambda config: "a digest of this program's"):
        refused(lambda: provider.start(0, config), "a digest of this program's", config_digest(config))
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left of it")
    assert generated(provider.start(0, config).client)
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
    refused(lambda: provider.start(0, config), "ModuleNotFoundError", "rollout_engine", "on every node")
    provider.shutdown()
    settle(lambda: not actors("ALIVE") and not groups("CREATED"), "nothing is left of it")


def slow_to_load(config):
    """A configuration of a core that stays in the middle of its start. Returns it, and a file that tells when."""
    begun = Path(os.environ[BEGUN])
    begun.unlink(missing_ok=True)
    return changed(config, logits_processors=("tests.faults.slow_start:Slow",)), begun
