"""Services whose parts die, hang or cannot be reached, again and again, under load."""

import asyncio
import os
import signal

import psutil
import ray
from ray.cluster_utils import Cluster

from rollout_engine.testing import tiny_model
from tests.faults.replica_deaths import ReplicaDeaths
from tests.ray.running import SMALL, actor_pid, scenario, small_cluster
from tests.ray.service import all_serve, at_output, noted, noted_losses, read_all, service, signalled, truth

_NUM_KILLS = 20
_LOST_ANSWERS = '{"CoreWorkerService.grpc_client.PushTask": {"num_failures": 2, "resp_failure_prob": 100}}'
"""The answers to the first two calls of an actor do not arrive, though the calls have run."""


@scenario
def twenty_kills_under_load_lose_and_repeat_nothing(config):
    weights = tiny_model(seed=3).state_dict()
    expected = truth(config.model, weights)

    async def run(engine):
        await engine.update_weights(weights)
        deaths = ReplicaDeaths(engine, seed=0)
        await deaths.run([signal.SIGKILL] * _NUM_KILLS, expected)
        assert deaths.num_continued, "replicas had requests when they were killed"
        print(f"{_NUM_KILLS} kills, {deaths.num_requests} requests, {deaths.num_tokens} tokens: as undisturbed")
        print(f"{deaths.num_continued} samples went on at another replica")
        print("noticed after", shown(deaths.noticed_seconds["SIGKILL"], 1000, "ms"))
        print("caught up after its start and", shown(deaths.caught_up_seconds, 1, "s"), flush=True)

    small_cluster()
    with service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


@scenario
def a_core_that_hangs_costs_no_token(config):
    expected = truth(config.model)

    async def run(engine):
        with noted_losses(engine.frontend.client) as losses:
            pid, times = (await all_serve(engine))[0].pid, []
            assert await read_all(engine, at_output(400, signalled(pid, signal.SIGSTOP, times))) == expected
            await noted(losses, 0)
        assert (await all_serve(engine))[0].pid != pid
        print("a hang is detected after", shown([losses[0][1] - times[0]], 1, "s"))

    small_cluster()
    with service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


@scenario
def an_actor_that_is_killed_costs_no_token(config):
    expected = truth(config.model)

    async def run(engine):
        client = engine.frontend.client
        with noted_losses(client) as losses:
            replica, times = client._members[1].replica, []
            kill = signalled(actor_pid(replica), signal.SIGKILL, times)
            assert await read_all(engine, at_output(400, kill)) == expected
            await noted(losses, 1)
        await all_serve(engine)
        assert await read_all(engine) == expected
        print("an actor's death is detected after", shown([losses[0][1] - times[0]], 1000, "ms"))

    small_cluster()
    with service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


@scenario
def calls_whose_answers_are_lost_are_reconciled(config):
    os.environ["RAY_testing_rpc_failure"] = _LOST_ANSWERS
    cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"env_vars": {"RAY_testing_rpc_failure": ""}})
    ray.init(address=cluster.address)

    async def run(engine):
        await engine.update_weights(tiny_model(seed=3).state_dict())
        assert await read_all(engine) == truth(config.model, tiny_model(seed=3).state_dict())
        replica = engine.frontend.client._members[0].replica
        children = psutil.Process(actor_pid(replica)).children()
        assert [child.pid for child in children if child.name() != "sh"] == [replica.client.pid], (
            "the order given twice has started one core"
        )

    with service(config, num_replicas=1) as engine:
        asyncio.run(run(engine))
    ray.shutdown()
    cluster.shutdown()


def shown(values, factor, unit):
    """Median, 99th percentile (of few values the largest) and number of times, in words."""
    ranked = sorted(value * factor for value in values)
    p50, p99 = ranked[len(ranked) // 2], ranked[min(int(len(ranked) * 0.99), len(ranked) - 1)]
    return f"p50 {p50:.3g} {unit}, p99 {p99:.3g} {unit} of {len(ranked)}"
