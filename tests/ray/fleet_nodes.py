"""Services over two nodes: weights on each, and the end of a node.

The nodes of `ray.cluster_utils` are on one machine and see each other's shared memory. That each reads its own copy is
proved by damage: weights that are spoilt in one copy fail where that one is read, and nowhere else.
"""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import ray

import sync
from rollout_engine.base.errors import ManifestMismatchError
from rollout_engine.fleet.ray import stores as ray_stores
from rollout_engine.testing import tiny_model
from tests.ray.running import scenario, settle, two_nodes
from tests.ray.service import all_serve, at_output, noted, noted_losses, published, read_all, service, signalled, truth

_PIECE_BYTES = 10_000
"""Tensors are in several pieces then, and pieces have several tensors."""


@scenario
def weights_are_copied_once_to_each_node(config):
    ray_stores._PIECE_BYTES = _PIECE_BYTES
    made, make = [], ray_stores._Copy.make

    def make_noted(copy, publication, manifest, pieces, seconds):
        made.append(manifest.version)
        assert len(pieces) > 10
        make(copy, publication, manifest, pieces, seconds)

    ray_stores._Copy.make = make_noted

    async def run(engine):
        far = [replica.index for replica in await all_serve(engine) if replica.node != here()]
        assert len(far) == 2, "two replicas of three are on the other node"
        for seed in range(3, 7):
            report = await engine.update_weights(tiny_model(seed=seed).state_dict())
            assert sorted(report.replicas) == [0, 1, 2]
        assert made == [1, 2, 3, 4], "one copy of each publication for both"
        assert len(set(await engine.collective_rpc("get_weight_digest"))) == 1
        original, copy = (Path(path) for path in published(engine))
        assert original != copy and sync.open_current(copy).manifest == sync.open_current(original).manifest
        assert len(list((copy / "versions").iterdir())) <= 2, "older publications are removed"
        assert await read_all(engine) == truth(config.model, tiny_model(seed=6).state_dict())

        spoil(original)
        await restart(engine, far[0])
        await all_serve(engine)
        assert len(set(await engine.collective_rpc("get_weight_digest"))) == 1, "it has read its node's copy"
        assert made == [1, 2, 3, 4], "which was there already"

        spoil(copy)
        await restart(engine, far[1])
        while "digest" not in (problem := (await engine.replicas())[far[1]].problem):
            assert (await engine.replicas())[far[1]].state != "SYNCED", "spoilt weights serve nothing"
            await asyncio.sleep(0.05)
        print("a spoilt copy:", problem)
        await engine.update_weights(tiny_model(seed=7).state_dict())
        await all_serve(engine)
        assert len(set(await engine.collective_rpc("get_weight_digest"))) == 1

    with two_nodes(num_cpus=2), service(config, num_replicas=3) as engine:
        asyncio.run(run(engine))
    ray_stores._Copy.make = make


@scenario
def a_path_is_read_by_each_node_itself(config):
    store = Path(os.environ["TMPDIR"]) / "store"

    async def run(engine):
        await all_serve(engine)
        error = await failed(engine.update_weights("/no/such/weights"))
        assert type(error) is ManifestMismatchError and "On node " in str(error), error
        sync.publish(store, tiny_model(seed=8).state_dict(), 5)
        report = await engine.update_weights(store)
        assert report.version == 5 and sorted(report.replicas) == [0, 1]
        assert published(engine) == [], "nothing is copied"
        assert len(set(await engine.collective_rpc("get_weight_digest"))) == 1
        shutil.rmtree(store)
        far = next(replica for replica in await engine.replicas() if replica.node != here())
        await restart(engine, far.index)
        while f"On node {far.node}" not in (problem := (await engine.replicas())[far.index].problem):
            await asyncio.sleep(0.05)
        assert "does not exist" in problem

    with two_nodes(), service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


@scenario
def a_node_that_dies_costs_no_token(config):
    weights = tiny_model(seed=3).state_dict()
    expected = truth(config.model, weights)

    async def run(engine, cluster, other_node):
        client = engine.frontend.client
        await all_serve(engine)
        await engine.update_weights(weights)
        far = next(replica.index for replica in await engine.replicas() if replica.node != here())
        original, copy = (Path(path) for path in published(engine))
        with noted_losses(client) as losses:
            end = at_output(400, lambda: cluster.remove_node(other_node, allow_graceful=False))
            assert await read_all(engine, end) == expected
            await noted(losses, far)
        settle(lambda: not copy.exists(), "the copy has gone with its node")
        assert original.exists()
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        found = await all_serve(engine)
        assert [replica.state for replica in found] == ["SYNCED", "SYNCED"] and found[far].node != here()
        assert await read_all(engine) == expected, "the new node's replica has the newest weights"
        await engine.scale(1)
        while [replica.state for replica in await engine.replicas()].count("DEAD") != 1:
            await asyncio.sleep(0.02)
        await engine.scale(2)
        found = await all_serve(engine)
        assert [replica.state for replica in found].count("SYNCED") == 2
        assert len(set(await engine.collective_rpc("get_weight_digest"))) == 1
        assert await read_all(engine) == expected

    with two_nodes() as (cluster, other_node), service(config, num_replicas=2) as engine:
        asyncio.run(run(engine, cluster, other_node))


@scenario
def kills_on_another_node_lose_nothing(config):
    weights = tiny_model(seed=3).state_dict()
    expected = truth(config.model, weights)

    async def run(engine):
        client = engine.frontend.client
        await all_serve(engine)
        await engine.update_weights(weights)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            far, times = next(replica for replica in await all_serve(engine) if replica.node != here()), []
            with noted_losses(client) as losses:
                assert await read_all(engine, at_output(400, signalled(far.pid, number, times))) == expected
                await noted(losses, far.index)
            print(f"{number.name} on another node is detected after {losses[0][1] - times[0]:.3g} s", flush=True)
        await all_serve(engine)
        assert len(set(await engine.collective_rpc("get_weight_digest"))) == 1

    with two_nodes(), service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


async def restart(engine, index):
    """Kill a replica's core, and wait until that is known."""
    os.kill((await engine.replicas())[index].pid, signal.SIGKILL)
    while (await engine.replicas())[index].state == "SYNCED":
        await asyncio.sleep(0.02)


async def failed(call):
    """The error of a call that has to fail."""
    found = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(found[0], Exception), found
    return found[0]


def spoil(store):
    """Overwrite all published tensors with zeros; names, sizes and digests stay."""
    files = list(store.glob("versions/*/*.memmap"))
    assert files
    for file in files:
        with file.open("r+b") as stream:
            stream.write(bytes(file.stat().st_size))


def here():
    """The name of this program's node."""
    node_id = ray.get_runtime_context().get_node_id()
    name = next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == node_id)
    return f"{name} ({node_id[:8]})"
