"""KV connectors of a fleet: its engines share one, and those of users meet."""

import asyncio
import os
import random
import signal
from unittest import mock

import pytest

from rollout_engine import LLM, AsyncLLM, RolloutService, SamplingParams
from rollout_engine.fleet.plan import brain
from rollout_engine.testing import tiny_checkpoint
from tests.faults.replica_deaths import all_serve, said

pytestmark = pytest.mark.slow
PROMPT = {"prompt_token_ids": [3 + 7 * i % 250 for i in range(300)]}
PARAMS = SamplingParams(max_tokens=10, logprobs=0, ignore_eos=True, seed=3)
OPTIONS = dict(num_kv_blocks=256, max_num_seqs=8, num_threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def service(checkpoint, connector):
    return RolloutService.from_pretrained(checkpoint, num_replicas=2, verbose=False, kv_connector=connector, **OPTIONS)


def test_replicas_find_the_kv_of_one_another_also_of_lost_ones(checkpoint, tmp_path):
    with LLM(checkpoint, log_stats=False, **OPTIONS) as llm:
        (alone,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    with service(checkpoint, f"disk:{tmp_path}") as fleet:
        found = [fleet.generate([PROMPT], PARAMS, replica_index=index % 2)[0] for index in range(4)]
        for output in found:
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert [float(x).hex() for x in output.outputs[0].logprobs] == [
                float(x).hex() for x in alone.outputs[0].logprobs
            ]
        assert [output.num_cached_tokens for output in found[1:]] == [288] * 3
        assert fleet.reset_prefix_cache(False, True)
        assert fleet.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_connectors_of_users_meet_those_of_all_other_replicas(checkpoint, tmp_path):
    with service(checkpoint, f"tests.integration.dict_connector:Meeting:{tmp_path}") as fleet:
        fleet.get_num_unfinished_requests()
        pids = sorted(int(path.name) for path in tmp_path.iterdir())
        assert len(pids) == 2 and os.getpid() not in pids
        met = {int(path.name): path.read_text().split() for path in tmp_path.iterdir()}
        assert met == {pids[0]: [str(pids[1])], pids[1]: [str(pids[0])]}


NUM_REQUESTS, NUM_ROUNDS = 8, 6
LONG = SamplingParams(max_tokens=400, seed=2, logprobs=0, ignore_eos=True, detokenize=False)


def long_prompt(number):
    return {"prompt_token_ids": [3 + (7 + number) * i % 250 for i in range(200 + 13 * number)]}


async def read_all(engine, at_token):
    """Read all requests; `at_token` is called with the number of tokens that each has by then."""
    counts, found = [0] * NUM_REQUESTS, [None] * NUM_REQUESTS

    async def read(number):
        async for output in engine.generate(long_prompt(number), LONG.clone(seed=number)):
            counts[number] = len(output.outputs[0].token_ids)
            found[number] = said(output.outputs)
            await at_token(counts)

    await asyncio.gather(*map(read, range(NUM_REQUESTS)))
    return found


def test_a_replica_that_takes_over_loads_what_was_written_and_changes_no_bit(tmp_path):
    path, choice = tiny_checkpoint(tmp_path / "model", max_position_embeddings=4096), random.Random(7)
    options = OPTIONS | dict(num_kv_blocks=1024)
    with LLM(path, log_stats=False, **options) as llm:
        rows = [(long_prompt(number), LONG.clone(seed=number)) for number in range(NUM_REQUESTS)]
        alone = llm.generate(*map(list, zip(*rows, strict=True)), use_tqdm=False)
    rounds = []

    async def strike(engine):
        replicas = await all_serve(engine)
        at, state = choice.randint(40, 380), {}

        def requests_of(replica):
            return len(engine.frontend.client._brain.ledger.of_replica(replica.index))

        async def at_token(counts):
            if not state and min(counts):
                state["before"] = None
                state["before"] = (await engine.get_metrics()).replicas
            elif state.get("before") is not None and "survivor" not in state and max(counts) >= at:
                victim, state["survivor"] = sorted(replicas, key=requests_of, reverse=True)
                state["moved"] = requests_of(victim)
                os.kill(victim.pid, signal.SIGKILL)

        found = await read_all(engine, at_token)
        assert found == [said(output.outputs) for output in alone], "a request has other tokens than undisturbed"
        metrics = (await engine.get_metrics()).replicas, state["before"]
        after, before = (each[state["survivor"].index].core.counters for each in metrics)
        looked_up = after.num_looked_up_tokens - before.num_looked_up_tokens
        rounds.append((state["moved"], looked_up, looked_up - after.num_cached_tokens + before.num_cached_tokens))
        print("sequences moved, their tokens, tokens computed again:", rounds[-1])
        assert await engine.reset_prefix_cache(reset_connector=True)

    async def run():
        with AsyncLLM(path, num_replicas=2, kv_connector=f"disk:{tmp_path / 'kv'}", **options) as engine:
            for _ in range(NUM_ROUNDS):
                await strike(engine)

    with mock.patch.object(brain, "_PROVEN_SECONDS", 0.0):
        asyncio.run(run())
    assert all(moved for moved, _, _ in rounds) and min(looked_up - computed for _, looked_up, computed in rounds) >= 0
    assert sum(computed for _, _, computed in rounds) < sum(looked_up for _, looked_up, _ in rounds)
