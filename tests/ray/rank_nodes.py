"""Ranks of one engine over two nodes: the bits of one process, and the ends of ranks and of nodes."""

import asyncio
import os
import signal
from pathlib import Path

import ray

from rollout_engine import LLM, AsyncLLM, EngineDeadError, SamplingParams
from rollout_engine.base.errors import RetryableError
from rollout_engine.execution import ray_ranks
from rollout_engine.execution.rank_launcher import MODULE
from rollout_engine.testing import tiny_model
from tests.ray.conftest import running_in
from tests.ray.running import OPTIONS, actors, groups, lives, refused, scenario, settle, two_nodes
from tests.ray.service import all_serve, read_all, service, truth

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], list(range(9, 40)))]
PARAMS = SamplingParams(temperature=1.0, max_tokens=12, n=2, logprobs=0, seed=3, ignore_eos=True)


@scenario
def ranks_over_two_nodes_give_the_bits_of_one_process(config):
    with two_nodes(num_cpus=2), over_ray(config, 4) as cut, one_process(config) as whole:
        here = ray.get_runtime_context().get_node_id()
        assert any(actor["Address"]["NodeID"] != here for actor in actors("ALIVE")), "a rank is on the other node"
        assert said(cut) == said(whole)
        weights = tiny_model(seed=3).state_dict()
        assert cut.update_weights(weights).digest == whole.update_weights(weights).digest
        assert said(cut) == said(whole)
        assert len(cut.collective_rpc("get_weight_digest")) == 4
        pids = rank_pids(cut)
        cut.shutdown()
        settle(lambda: not actors("ALIVE") and not groups("CREATED"), "neither actor nor placement group is left")
        assert not any(map(lives, pids))


@scenario
def a_rank_on_a_node_that_ends_is_named(config):
    with two_nodes(num_cpus=2), over_ray(config, 2) as engine:
        (pid,) = rank_pids(engine)
        os.kill(pid, signal.SIGKILL)
        refused(lambda: said(engine), f"rank 1 (process {pid} on node", "with status -9", kind=EngineDeadError)


@scenario
def ranks_of_a_core_join_the_cluster_of_its_client(config):
    async def run():
        async with over_ray(config, 2, AsyncLLM) as engine:
            assert len(actors("ALIVE")) == 1
            return await engine.collective_rpc("get_weight_digest")

    with two_nodes(num_cpus=2):
        assert len(asyncio.run(run())) == 2
        settle(lambda: not actors("ALIVE") and not groups("CREATED"), "neither actor nor placement group is left")


@scenario
def ranks_that_find_no_room_are_refused(config):
    with two_nodes(num_cpus=1):
        asked = "1 CPU, 0 GPU for each rank but the first, 3 times"
        refused(lambda: over_ray(config, 4), "tensor_parallel_size=4", asked, "room for 2")
        ray_ranks._PLACE_SECONDS = 1.0
        taken = ray.util.placement_group([{"CPU": 1}] * 2)
        ray.get(taken.ready())
        refused(lambda: over_ray(config, 2), "Free:", "within 1 s", kind=RetryableError)


def one_process(config):
    return LLM(config.model, **OPTIONS)


def over_ray(config, num_ranks, kind=LLM):
    return kind(config.model, **OPTIONS, tensor_parallel_size=num_ranks, executor="ray")


def said(engine):
    found = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    samples = [(list(c.token_ids), c.logprobs.tobytes()) for output in found for c in output.outputs]
    return samples, [each.tobytes() for each in engine.score([[5, 9, 2], [7]], [[4, 5], [8]])]


def rank_pids(engine):
    """Processes of the ranks from 1 on: all nodes are this program's, on this machine."""
    marked = [process.pid for process in running_in(Path(os.environ["TMPDIR"]).parent) if MODULE in process.cmdline()]
    assert len(marked) == len(engine.llm_engine.frontend.client.driver.executor._team.regions)
    return marked


@scenario
def a_replica_on_ray_has_ranks_on_ray(config):
    """The replica reserves its rank 0 alone, and its core, a child of an actor, finds the cluster."""

    async def run(engine):
        await all_serve(engine)
        assert len(actors("ALIVE")) >= 2 and len(groups("CREATED")) == 2
        return await read_all(engine), await engine.collective_rpc("get_weight_digest")

    with two_nodes(num_cpus=2), service(config, num_replicas=1, tensor_parallel_size=2, executor="ray") as engine:
        found, digests = asyncio.run(run(engine))
    assert found == truth(config.model) and len(digests) == 2
