"""Services on the nodes of a small cluster: what their users do with them."""

import asyncio
import signal

from rollout_engine import LifecycleError, RolloutPolicy, SamplingParams
from rollout_engine.testing import tiny_model
from tests.faults.replica_deaths import PROMPTS
from tests.ray.running import refused, scenario, small_cluster
from tests.ray.service import OPTIONS, all_serve, at_output, noted, noted_losses, read_all, service, signalled, truth


@scenario
def a_service_of_one_replica_takes_weights_and_answers(config):
    weights = tiny_model(seed=3).state_dict()

    async def run(engine):
        report = await engine.update_weights(weights)
        assert [*report.replicas] == [0] and engine.policy_version == report.version == 1
        assert await read_all(engine) == truth(config.model, weights)
        engine.frontend.client.check_integrity()

    small_cluster()
    with service(config, num_replicas=1) as engine:
        asyncio.run(run(engine))


@scenario
def a_service_loses_a_replica_and_not_a_token(config):
    async def run(engine):
        report = await engine.update_weights(tiny_model(seed=3).state_dict())
        assert sorted(report.replicas) == [0, 1] and engine.policy_version == report.version
        expected = await read_all(engine)
        pid, times = (await engine.replicas())[0].pid, []
        with noted_losses(engine.frontend.client) as losses:
            found = await read_all(engine, at_output(400, signalled(pid, signal.SIGKILL, times)))
            await noted(losses, 0)
        assert found == expected
        engine.frontend.client.check_integrity()

    with service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


@scenario
def one_replica_on_ray_is_a_fleet_too(config):
    async def run(engine):
        expected = await read_all(engine)
        pid = (await engine.replicas())[0].pid
        found = await read_all(engine, at_output(400, signalled(pid, signal.SIGKILL, [])))
        assert found == expected, "its requests wait for the next one"
        assert (await all_serve(engine))[0].pid != pid

    small_cluster()
    with service(config, num_replicas=1) as engine:
        asyncio.run(run(engine))


@scenario
def calls_reach_all_replicas_of_a_service(config):
    async def run(engine):
        digests = await engine.collective_rpc("get_weight_digest")
        assert len(digests) == 2 and digests[0] == digests[1]
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        await engine.resume_generation()
        await engine.sleep(level=1)
        await engine.wake_up()
        error = await asyncio.gather(engine.collective_rpc("begin_weight_update", args=[{}]), return_exceptions=True)
        assert type(error[0]) is LifecycleError
        refused(lambda: engine.address, "not one core", kind=LifecycleError)
        found = await engine.replicas()
        assert len({each.pid for each in found}) == 2 and all(each.node for each in found)

    small_cluster()
    with service(config, num_replicas=2) as engine:
        asyncio.run(run(engine))


@scenario
def a_service_grows_and_shrinks_under_load(config):
    async def run(engine):
        expected = await read_all(engine)
        reading = asyncio.create_task(read_all(engine))
        await engine.scale(2)
        assert await reading == expected
        found = await all_serve(engine)
        assert [replica.state for replica in found] == ["SYNCED", "SYNCED"]
        report = await engine.update_weights(tiny_model(seed=5).state_dict())
        assert sorted(report.replicas) == [0, 1]
        expected = await read_all(engine)
        reading = asyncio.create_task(read_all(engine))
        await asyncio.sleep(0.2)
        await engine.scale(1)
        assert await reading == expected, "the requests of the replica that goes end first"
        while (await engine.replicas())[1].state != "DEAD":
            await asyncio.sleep(0.02)
        error = await asyncio.gather(engine.scale(3), return_exceptions=True)
        assert "room for 1" in str(error[0]) and "num_replicas=2" in str(error[0]), error
        await engine.scale(2)
        found = await all_serve(engine)
        assert [replica.state for replica in found] == ["SYNCED", "DEAD", "SYNCED"]
        assert found[2].policy_version == report.version
        assert await read_all(engine) == expected

    small_cluster()
    with service(config, num_replicas=1) as engine:
        asyncio.run(run(engine))


@scenario
def a_policy_on_ray_rolls_out_the_same(config):
    params = SamplingParams(max_tokens=8, detokenize=False)
    small_cluster()
    with RolloutPolicy.from_pretrained(config.model, **OPTIONS) as one:
        alone = one.rollout(PROMPTS, params, num_samples=4, seed=2, use_tqdm=False)
    with RolloutPolicy.from_pretrained(config.model, num_replicas=2, placement="ray", **OPTIONS) as many:
        found = many.rollout(PROMPTS, params, num_samples=4, seed=2, use_tqdm=False)
    assert (found["tokens", "full"] == alone["tokens", "full"]).all()
    assert (found["log_probs", "full"] == alone["log_probs", "full"]).all()
