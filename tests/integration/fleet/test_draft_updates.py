"""Weights of the draft model over two processes: at both, and at one that is started anew."""

import asyncio
import os
import signal

import pytest

from rollout_engine import AsyncLLM, SamplingParams, SpeculationConfig
from rollout_engine.base.errors import ManifestMismatchError
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.replica_deaths import all_serve

pytestmark = pytest.mark.slow  # tests/unit/fleet has all of it over fakes

OPTIONS = dict(num_kv_blocks=512, num_threads=1, skip_tokenizer_init=True, log_stats=False)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, seed=3, detokenize=False)
PROMPT = list(range(3, 30))


def drafting(client):
    """(version, digest) of the draft model of each replica."""
    members = client._members.values()
    versions = [member.client.call("get_live_weights", {"draft": True}).result()[0] for member in members]
    return versions, [member.draft_digest for member in members]


async def sampled(engine):
    async for output in engine.generate(PROMPT, PARAMS, "a"):
        last = output
    (sample,) = last.outputs
    return sample.token_ids, [float(x).hex() for x in sample.logprobs]


async def play(engine, weights):
    client, said = engine.frontend.client, [await sampled(engine)]
    reports = [await engine.update_weights(source, draft=True) for source in (weights, weights.state_dict())]
    assert [report.version for report in reports] == [1, 2] and list(reports[1].replicas) == [0, 1]
    versions, digests = drafting(client)
    assert versions == [2, 2] and digests == [reports[1].digest] * 2
    with pytest.raises(ManifestMismatchError):
        await engine.update_weights({}, draft=True)
    said.append(await sampled(engine))
    os.kill((await engine.replicas())[1].pid, signal.SIGKILL)
    while (await engine.replicas())[1].state == "SYNCED":
        await asyncio.sleep(0.01)
    await all_serve(engine)
    while drafting(client) != ([2, 2], digests):
        await asyncio.sleep(0.01)
    assert (await engine.update_weights(tiny_model(seed=4))).version == 1, "the policy's versions are its own"
    await engine.update_weights(weights, draft=True)
    assert drafting(client)[0] == [3, 3]
    assert said[0] == said[1]


def test_every_replica_gets_the_draft_models_weights_also_one_that_starts_later(tmp_path):
    config = SpeculationConfig(sources=(), draft_model=tiny_checkpoint(tmp_path / "draft", num_hidden_layers=1))
    with AsyncLLM(tiny_checkpoint(tmp_path / "model"), num_replicas=2, speculation=config, **OPTIONS) as engine:
        asyncio.run(play(engine, tiny_model(num_hidden_layers=1, seed=9)))
