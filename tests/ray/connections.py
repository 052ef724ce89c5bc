"""Connections of providers to a cluster, and of their clients to cores on other nodes."""

from pathlib import Path

import ray

from rollout_engine.fleet.ray.provider import RayProvider
from tests.ray.running import (
    actors,
    expect_gone,
    generated,
    groups,
    lives,
    refused,
    scenario,
    settle,
    small_cluster,
    two_nodes,
)


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
    with two_nodes() as (cluster, other_node):
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
