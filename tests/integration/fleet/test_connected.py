"""A fleet of cores that somebody else has started, over TCP."""

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest

import sync
from rollout_engine import LLM, AsyncLLM, ConfigError, WeightUpdateError
from rollout_engine.base.config import EngineConfig
from rollout_engine.fleet.placements import connect_client
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.keys import Keys
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.clean import Leftovers
from tests.faults.replica_deaths import PARAMS, PROMPTS, all_serve, read, said

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)
KEYS = Keys.make()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@contextmanager
def core(checkpoint, listen="tcp://127.0.0.1:0", **changes):
    """A core's process, and where it listens."""
    config = EngineConfig.from_kwargs(model=str(checkpoint), **(OPTIONS | changes))
    process = CoreProcess(config, heartbeat_seconds=0.1, max_backlog_bytes=64 << 20, listen=listen, keys=KEYS)
    try:
        yield process, process.wait_ready(600).address
    finally:
        process.end(kill=True)


def connect(*addresses):
    return AsyncLLM.from_client(connect_client(list(addresses), keys=KEYS, hang_seconds=4.5))


@pytest.mark.slow
def test_cores_elsewhere_serve_as_one_and_one_that_comes_back_joins_again(checkpoint, tmp_path):
    with LLM(checkpoint, **OPTIONS) as llm:
        params = [each.clone(output_kind="final_only", detokenize=False) for each in PARAMS]
        expected = [said(output.outputs) for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    async def run(engine, first):
        assert [replica.node for replica in await all_serve(engine)] == [address, other]
        reads = [asyncio.create_task(read(engine, i)) for i in range(len(PROMPTS))]
        await asyncio.sleep(0.2)
        os.kill(first.pid, signal.SIGKILL)
        assert await asyncio.gather(*reads) == expected
        with pytest.raises(WeightUpdateError, match="cannot read what is published in this machine's memory"):
            await engine.update_weights(tiny_model(seed=2).state_dict())
        sync.publish(tmp_path / "store", tiny_model(seed=2).state_dict(), 7)
        assert (await engine.update_weights(tmp_path / "store")).version == 7
        with core(checkpoint, listen=address):
            found = await all_serve(engine)
            assert [replica.policy_version for replica in found] == [7, 7]
            digests = await engine.collective_rpc("get_weight_digest")
            assert digests[0] == digests[1]
            engine.shutdown()

    with core(checkpoint) as (first, address), core(checkpoint) as (_, other):
        leftovers = Leftovers()
        with connect(address, other) as engine:
            asyncio.run(run(engine, first))
        with AsyncLLM.from_client(connect_client(other, keys=KEYS, hang_seconds=4.5)) as alone:
            assert alone.policy_version == 7, "the core was left to its owner"
        leftovers.assert_none()


@pytest.mark.slow
def test_requests_of_a_core_that_its_owner_ends_go_on_and_it_is_taken_in_when_it_comes_back(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        params = [each.clone(output_kind="final_only", detokenize=False) for each in PARAMS]
        expected = [said(output.outputs) for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    async def run(engine, first):
        await all_serve(engine)
        reads = [asyncio.create_task(read(engine, i)) for i in range(len(PROMPTS))]
        await asyncio.sleep(0.2)
        os.kill(first.pid, signal.SIGTERM)
        reads += [asyncio.create_task(read(engine, i)) for i in range(len(PROMPTS))]
        assert await asyncio.gather(*reads) == 2 * expected
        assert await asyncio.to_thread(first.wait, 60) == 0, "it has ended in order"
        with core(checkpoint, listen=address) as (again, _):
            assert [replica.pid for replica in await all_serve(engine)][0] == again.pid
            assert await asyncio.gather(*(read(engine, i) for i in range(len(PROMPTS)))) == expected
            engine.shutdown()

    with core(checkpoint) as (first, address), core(checkpoint) as (_, other):
        leftovers = Leftovers()
        with connect(address, other) as engine:
            asyncio.run(run(engine, first))
        leftovers.assert_none()


@pytest.mark.slow
def test_cores_that_differ_are_no_fleet(checkpoint, tmp_path):
    with core(checkpoint) as (_, address), core(checkpoint, max_num_seqs=32) as (_, other):
        with pytest.raises(ConfigError, match=f"The core at {other} has configuration .*, the first core has"):
            connect(address, other)
        with pytest.raises(ConfigError, match="a list of some, each once"):
            connect(address, address)
        with connect(address) as engine, pytest.raises(ConfigError, match="0 of the 1 cores .* are free"):
            asyncio.run(engine.scale(2))
        sync.publish(tmp_path / "store", tiny_model(seed=2).state_dict(), 0)
        with core(checkpoint) as (_, third):
            with AsyncLLM.from_client(connect_client(third, keys=KEYS, hang_seconds=4.5)) as alone:
                asyncio.run(alone.update_weights(tmp_path / "store", reset_version=True))
            with pytest.raises(ConfigError, match="has loaded other weights"):
                connect(address, third)
