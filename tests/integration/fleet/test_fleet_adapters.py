"""Adapters over two processes: the same at both, at one that starts later, and at one that has missed a change."""

import asyncio
import os
import signal

import numpy as np
import pytest

from rollout_engine import LLM, AsyncLLM, RolloutService, SamplingParams
from rollout_engine.base.errors import LifecycleError, RequestError, RPCError, StaleVersionError
from rollout_engine.testing import random_adapter, save_adapter, tiny_checkpoint, tiny_model
from tests.faults.replica_deaths import all_serve
from tests.unit.peft_layers import PeftModel

pytestmark = pytest.mark.slow  # tests/conformance has each verb over a fleet, tests/unit/fleet the rest

OPTIONS = dict(num_kv_blocks=512, num_threads=1, skip_tokenizer_init=True, log_stats=False, max_loras=2)
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0, seed=3, detokenize=False)
PROMPT = list(range(3, 30))


def adapter(name="a", **options):
    return random_adapter(tiny_model(), name, **({"seed": ord(name[0])} | options))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(checkpoint):
    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def service(engine):
    """Two replicas that serve, without adapters."""
    asyncio.run(all_serve(engine))
    service = RolloutService(engine.frontend)
    yield service
    for info in service.list_loras():
        service.remove_lora(info.name)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Samples of one engine under these adapters, each added in turn under the name "a"."""
    with LLM(checkpoint, **OPTIONS) as llm:
        found = {}
        for seed in (1, 2):
            llm.add_lora(adapter(seed=seed, revision=seed))
            found[seed] = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request="a")[0].outputs[0]
        return found


def sampled(service, replica, lora="a"):
    (output,) = service.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=lora, replica_index=replica)
    return output.outputs[0]


def assert_both_sample(service, expected, version):
    """Both replicas sample what one engine does, and say this version."""
    for replica in (0, 1):
        found = sampled(service, replica)
        assert found.token_ids == expected.token_ids and np.array_equal(found.logprobs, expected.logprobs)
        assert [span.policy_version for span in found.version_spans] == [version]


def test_every_replica_has_the_adapter_and_its_newest_revision(service, alone, tmp_path):
    version = service.policy_version
    on_disk = save_adapter(tmp_path, adapter(seed=1))
    info = service.add_lora(on_disk)
    (tmp_path / "adapter_config.json").unlink()  # the fleet keeps the values
    assert service.add_lora(adapter(seed=1)) == info and service.list_loras() == [info]
    assert_both_sample(service, alone[1], version)
    with pytest.raises(RequestError, match="revision=0 .* more than 0"):
        service.add_lora(adapter(seed=2))
    newer = service.add_lora(adapter(seed=2, revision=4))
    assert (newer.revision, newer.policy_version, service.policy_version) == (4, version + 1, version + 1)
    assert_both_sample(service, alone[2], version + 1)
    (scored,) = service.score([PROMPT], [alone[2].token_ids], lora="a")
    assert np.array_equal(scored, alone[2].logprobs)
    assert service.remove_lora("a") and not service.remove_lora("a")
    with pytest.raises(RequestError, match="Unknown adapter 'a'"):
        sampled(service, 0)


def test_a_request_may_bring_its_adapter_and_the_same_one_gives_way_everywhere(service):
    for name in "abc":
        sampled(service, 0, adapter(name))
    assert [info.name for info in service.list_loras()] == ["b", "c"]
    assert service.pin_lora("b").is_pinned
    service.add_lora(adapter("d"))
    assert [(info.name, info.is_pinned) for info in service.list_loras()] == [("b", True), ("d", False)]
    for replica in (0, 1):
        assert sampled(service, replica, "b").token_ids != sampled(service, replica, "d").token_ids
    service.pin_lora("d")
    with pytest.raises(LifecycleError, match="no slot is free for 'e'; max_loras=2"):
        service.add_lora(adapter("e"))
    with pytest.raises(RequestError, match="rank=65"):
        service.add_lora(adapter("b", rank=65, revision=9))
    assert [info.name for info in service.list_loras()] == ["b", "d"]


def test_a_replica_that_is_started_anew_has_weights_and_adapters_before_its_first_token(service, engine, checkpoint):
    service.add_lora(adapter(seed=1))
    service.add_lora(adapter("b"))
    service.update_weights(tiny_model(seed=1).state_dict())
    service.add_lora(adapter(seed=2, revision=1))
    expected, version = sampled(service, 0), service.policy_version

    async def die():
        os.kill((await engine.replicas())[1].pid, signal.SIGKILL)
        while (await engine.replicas())[1].state == "SYNCED":
            await asyncio.sleep(0.01)
        return await all_serve(engine)

    assert [replica.policy_version for replica in asyncio.run(die())] == [version] * 2
    assert_both_sample(service, expected, version)
    assert sampled(service, 1, "b").token_ids == sampled(service, 0, "b").token_ids
    service.update_weights(checkpoint, version=version + 1)


def test_a_replica_that_misses_a_change_serves_nothing_before_it_has_caught_up(service, engine, alone, monkeypatch):
    service.add_lora(adapter(seed=1))
    failing(engine, monkeypatch, 1)
    service.add_lora(adapter(seed=2, revision=1))
    version = service.policy_version
    for _ in range(4):
        (output,) = service.generate([PROMPT], PARAMS, use_tqdm=False, lora_request="a")
        assert output.outputs[0].token_ids == alone[2].token_ids
    asyncio.run(all_serve(engine))
    assert_both_sample(service, alone[2], version)


def test_where_no_replica_commits_the_adapters_are_those_from_before(service, engine, alone, monkeypatch):
    before, version = service.add_lora(adapter(seed=1)), service.policy_version
    failing(engine, monkeypatch, 0, 1)
    with pytest.raises(RPCError, match="of the test"):
        service.add_lora(adapter(seed=2, revision=1))
    asyncio.run(all_serve(engine))
    assert service.list_loras() == [before] and service.policy_version == version
    assert_both_sample(service, alone[1], version)


def failing(engine, monkeypatch, *replicas):
    """Have the next commit of adapters fail at these replicas."""
    for replica in replicas:
        client = engine.frontend.client._members[replica].client

        def call(name, arguments, client=client, known=client.call):
            if name == "commit_loras":
                monkeypatch.setattr(client, "call", known)
                raise RPCError("a failure of the test", method=name)
            return known(name, arguments)

        monkeypatch.setattr(client, "call", call)


def test_the_adapter_of_a_peft_model_reaches_every_replica_as_a_version(service):
    trainer = PeftModel(tiny_model())
    version = service.policy_version
    report = service.update_weights(trainer, merge=False)
    assert report.version == version + 1 == service.policy_version and list(report.replicas) == [0, 1]
    assert report.num_tensors == 2 * len(trainer.adapters()) and report.num_bytes_sent == report.num_bytes > 0
    found = [sampled(service, replica, "default") for replica in (0, 1)]
    assert found[0].token_ids == found[1].token_ids
    assert {span.policy_version for each in found for span in each.version_spans} == {version + 1}
    with pytest.raises(StaleVersionError, match="must be more than"):
        service.update_weights(PeftModel(tiny_model(), rank=4), merge=False, version=version)
