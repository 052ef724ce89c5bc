"""Requests for policy versions over a fleet of two processes, of which one is lost and comes back late."""

import asyncio
import os
import signal

import pytest

from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.clean import Leftovers
from tests.faults.replica_deaths import all_serve

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)
PROMPTS = [[5 + index, 6, 7, 8, 9, 10, 11, 12, 13] for index in range(8)]
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=3, logprobs=0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    leftovers = Leftovers()
    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:
        yield engine
    leftovers.assert_none()


async def sample(fleet, prompt, params, **pin):
    async for output in fleet.generate({"prompt_token_ids": prompt}, params, **pin):
        last = output
    return last.outputs[0]


async def sample_all(fleet, params=LONG, **pin):
    return await asyncio.gather(*(sample(fleet, prompt, params, **pin) for prompt in PROMPTS))


def versions(sample):
    return {(span.policy_version, span.kv_min_version) for span in sample.version_spans}


@pytest.mark.slow
def test_a_pinned_request_of_a_lost_replica_goes_on_elsewhere_to_the_same_bits(fleet):
    async def run():
        found = await all_serve(fleet)
        live = fleet.policy_version
        free = await sample_all(fleet)
        pinned = asyncio.create_task(sample_all(fleet, policy_version=live))
        await asyncio.sleep(0.05)
        os.kill(found[1].pid, signal.SIGKILL)
        return live, free, await pinned

    live, free, pinned = asyncio.run(run())
    for one, other in zip(free, pinned, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs.tobytes() == other.logprobs.tobytes()
        assert other.finish_reason == "length" and versions(other) == {(live, live)}


@pytest.mark.slow
def test_waiting_requests_get_their_version_though_a_replica_misses_the_update(fleet):
    async def run():
        found = await all_serve(fleet)
        live = fleet.policy_version
        exact = asyncio.create_task(sample_all(fleet, policy_version=live + 1))
        least = asyncio.create_task(sample_all(fleet, min_policy_version=live + 1))
        ended = asyncio.create_task(sample_all(fleet, params=LONG.clone(max_tokens=3000), policy_version=live))
        while (await fleet.get_metrics()).core.num_awaiting_version < 2 * len(PROMPTS):
            await asyncio.sleep(0.01)
        os.kill(found[1].pid, signal.SIGKILL)
        await fleet.update_weights(tiny_model(seed=7).state_dict())
        assert fleet.policy_version == live + 1
        late = await sample_all(fleet, policy_version=live + 1)  # while the lost one loads the checkpoint's weights
        results = live, await exact, await least, await ended, late
        await all_serve(fleet)
        return *results, await sample_all(fleet, policy_version=live + 1)

    live, exact, least, ended, late, all_again = asyncio.run(run())
    for each in exact + least + late + all_again:
        assert each.finish_reason == "length" and versions(each) == {(live + 1, live + 1)}
    assert [each.token_ids for each in exact] == [each.token_ids for each in all_again]
    for each in ended:
        assert each.finish_reason == "abort" and f"version {live + 1} is live" in each.error
        assert versions(each) <= {(live, live)}
