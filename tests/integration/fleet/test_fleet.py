"""A fleet of two processes: what is lost or missed costs no token, and nothing is left of it."""

import asyncio
import os
import signal
import threading

import pytest
import torch

import sync
from rollout_engine import LLM, AsyncLLM, ConfigError, LifecycleError, RolloutPolicy, RolloutService, SamplingParams
from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.base.threads import raise_if_cancelled
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.clean import Leftovers
from tests.faults.replica_deaths import PARAMS, PROMPTS, ReplicaDeaths, all_serve, read, said

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def expected(checkpoint):
    params = [each.clone(output_kind="final_only", detokenize=False) for each in PARAMS]
    with LLM(checkpoint, **OPTIONS) as llm:
        return [said(output.outputs) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def fleet(checkpoint):
    leftovers = Leftovers()
    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:
        yield engine
    leftovers.assert_none()


@pytest.mark.slow
def test_requests_of_a_killed_replica_go_on_to_the_same_tokens_and_bits(fleet, expected):
    async def run():
        deaths = ReplicaDeaths(fleet, seed=0)
        await deaths.run([signal.SIGKILL], expected)
        assert deaths.num_continued
        assert any("status -9" in replica.problem for replica in await fleet.replicas())

    asyncio.run(run())


@pytest.mark.slow
def test_a_replica_that_is_told_to_end_costs_no_request_and_is_started_anew(fleet, expected):
    async def run():
        deaths = ReplicaDeaths(fleet, seed=2)
        await deaths.run([signal.SIGTERM, signal.SIGTERM], expected)
        assert deaths.num_requests == 2 * len(PROMPTS) and deaths.num_continued
        assert any("about to end: it received SIGTERM" in replica.problem for replica in await fleet.replicas())

    asyncio.run(run())


@pytest.mark.slow
def test_requests_wait_for_the_only_replica_where_that_is_told_to_end(checkpoint, expected):
    async def run(fleet):
        await fleet.scale(1)
        reads = [asyncio.create_task(read(fleet, i)) for i in range(len(PROMPTS))]
        await asyncio.sleep(0.3)
        os.kill((await fleet.replicas())[0].pid, signal.SIGTERM)
        while (await fleet.replicas())[0].state == "SYNCED":
            await asyncio.sleep(0.001)
        reads.append(asyncio.create_task(read(fleet, 1)))
        assert await asyncio.gather(*reads) == [*expected, expected[1]]

    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:  # its indexes differ afterwards
        asyncio.run(run(engine))


@pytest.mark.slow
def test_requests_of_a_replica_that_hangs_go_on_as_well(fleet, expected):
    asyncio.run(ReplicaDeaths(fleet, seed=1).run([signal.SIGSTOP], expected))


@pytest.mark.parametrize("verb", ["stage_weights", "commit_weights"])
def test_a_replica_that_misses_an_update_serves_nothing_until_it_has_caught_up(fleet, monkeypatch, verb):
    async def run():
        await all_serve(fleet)
        client = fleet.frontend.client._members[1].client

        def fail(*args):
            monkeypatch.undo()
            raise WeightUpdateError("the disk is full")

        monkeypatch.setattr(client, verb, fail)
        report = await fleet.update_weights(tiny_model(seed=3).state_dict())
        assert list(report.replicas) == [0] and fleet.policy_version == report.version
        one = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)
        outputs = []
        for _ in range(4):
            outputs += [output async for output in fleet.generate([9, 9], one)]
        versions = {span.policy_version for output in outputs for span in output.outputs[0].version_spans}
        assert versions == {report.version}
        found = await all_serve(fleet)
        assert [replica.policy_version for replica in found] == [report.version] * 2
        digests = await fleet.collective_rpc("get_weight_digest")
        assert digests[0] == digests[1]

    asyncio.run(run())


def test_no_replica_commits_where_they_have_read_different_weights(fleet, monkeypatch, tmp_path):
    async def run():
        await all_serve(fleet)
        before, version = await fleet.collective_rpc("get_weight_digest"), fleet.policy_version
        sync.publish(tmp_path / "other", tiny_model(seed=11).state_dict(), version + 1)
        client = fleet.frontend.client._members[1].client
        stage = client.stage_weights
        monkeypatch.setattr(client, "stage_weights", lambda path, *args: stage(str(tmp_path / "other"), *args))
        with pytest.raises(WeightUpdateError, match="replicas have read different weights"):
            await fleet.update_weights(tiny_model(seed=10).state_dict())
        monkeypatch.undo()
        assert fleet.policy_version == version
        assert await fleet.collective_rpc("get_weight_digest") == before
        assert {replica.state for replica in await fleet.replicas()} == {"SYNCED"}
        assert (await fleet.update_weights(tiny_model(seed=10).state_dict())).version == version + 1

    asyncio.run(run())


def test_an_update_that_is_cancelled_before_all_have_staged_changes_nothing(fleet, monkeypatch):
    async def run():
        await all_serve(fleet)
        before, version = await fleet.collective_rpc("get_weight_digest"), fleet.policy_version
        client, staged = fleet.frontend.client._members[1].client, threading.Event()
        stage = client.stage_weights

        def stage_for_ever(*args):
            stage(*args)
            staged.set()
            while True:
                raise_if_cancelled()

        monkeypatch.setattr(client, "stage_weights", stage_for_ever)
        update = asyncio.create_task(fleet.update_weights(tiny_model(seed=12).state_dict()))
        await asyncio.to_thread(staged.wait)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        monkeypatch.undo()
        assert fleet.policy_version == version
        while (report := await update_when_free(fleet)) is None:
            await asyncio.sleep(0.01)
        assert report.version == version + 1 and list(report.replicas) == [0, 1]
        assert await fleet.collective_rpc("get_weight_digest") != before

    asyncio.run(run())


async def update_when_free(fleet):
    """The report of an update; None while another one is being called off."""
    try:
        return await fleet.update_weights(tiny_model(seed=12).state_dict())
    except LifecycleError as problem:
        assert "another update" in str(problem) or "an update is" in str(problem), problem
        return None


def test_a_service_over_the_fleet_gives_what_an_llm_gives_and_pins_scores_and_updates(fleet, checkpoint):
    service = RolloutService(fleet.frontend)
    asyncio.run(all_serve(fleet))
    service.update_weights(checkpoint, version=service.policy_version + 1)
    params = SamplingParams(n=2, seed=3, max_tokens=20, logprobs=0, detokenize=False)
    with LLM(checkpoint, **OPTIONS) as llm:
        alone = [said(output.outputs) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    found = service.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False, session_id="s")
    assert [said(output.outputs) for output in found] == alone
    balancer = service.create_load_balancer()
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        (output,) = service.generate([prompt], params, use_tqdm=False, replica_index=balancer.select_replica(prompt))
        assert said(output.outputs) == expected
    digests = service.collective_rpc("get_weight_digest")
    assert list(digests) == [0, 1] and digests[0] == digests[1] != []
    assert service.collective_rpc("get_weight_digest", replica_index=1) == {1: digests[1]}
    assert [service.get_num_unfinished_requests(index) for index in (0, 1, None)] == [0, 0, 0]


@pytest.mark.slow
def test_a_replica_that_starts_later_has_the_newest_weights_and_the_state_of_the_others(fleet):
    async def run():
        await fleet.update_weights(tiny_model(seed=4).state_dict())
        report = await fleet.update_weights({"model.norm.weight": torch.full((64,), 2.0)}, partial=True)
        await fleet.pause_generation()
        os.kill((await fleet.replicas())[1].pid, signal.SIGKILL)
        while (await fleet.replicas())[1].state == "SYNCED":
            await asyncio.sleep(0.01)
        found = await all_serve(fleet)
        assert [replica.policy_version for replica in found] == [report.version] * 2
        assert await fleet.is_paused()
        await fleet.resume_generation()
        assert await fleet.collective_rpc("get_weight_digest") == [report.digest] * 2

    asyncio.run(run())


def test_a_part_of_the_weights_completes_those_that_all_have(fleet, tmp_path):
    weights, part = tiny_model(seed=5).state_dict(), {"model.norm.weight": torch.full((64,), 1.5)}

    async def run():
        published = sync.publish(tmp_path, weights, fleet.policy_version + 1)
        await fleet.update_weights(tmp_path)
        for refused in (fleet.update_weights(tmp_path, partial=True), fleet.update_weights(part, partial=True)):
            with pytest.raises(WeightUpdateError, match="first send all weights once, as an nn.Module or as tensors"):
                await refused
        assert (await fleet.update_weights(weights)).digest == published.digest
        for refused, message in (({}, "no tensor"), ({"more": torch.ones(1)}, "more")):
            with pytest.raises(WeightUpdateError, match=message):
                await fleet.update_weights(refused, partial=True)
        version = fleet.policy_version
        named_as_base = ((name.removeprefix("model."), tensor) for name, tensor in part.items())
        report = await fleet.update_weights(named_as_base, partial=True)
        whole = sync.publish(tmp_path, weights | part, version + 1, reset_version=True)
        assert (report.version, report.digest) == (version + 1, whole.digest)
        assert await fleet.collective_rpc("get_weight_digest") == [whole.digest] * 2

    asyncio.run(run())


@pytest.mark.slow
def test_replicas_come_and_go_while_requests_run(checkpoint):
    async def run(fleet):
        await fleet.update_weights(tiny_model().state_dict())
        one = SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False, seed=1, output_kind="final_only")
        requests = [asyncio.create_task(anext(fleet.generate([5 + i], one))) for i in range(8)]
        await asyncio.sleep(0.05)
        await fleet.scale(1)
        outputs = await asyncio.gather(*requests)
        assert {len(output.outputs[0].token_ids) for output in outputs} == {300}
        while [replica.state for replica in await fleet.replicas()].count("DEAD") != 1:
            await asyncio.sleep(0.01)
        await fleet.scale(2)
        while [replica.state for replica in await fleet.replicas()].count("SYNCED") != 2:
            await asyncio.sleep(0.05)
        assert [replica.policy_version for replica in await fleet.replicas() if replica.pid] == [
            fleet.policy_version
        ] * 2

    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:  # its indexes differ afterwards
        asyncio.run(run(engine))


@pytest.mark.slow
def test_a_policy_over_a_fleet_rolls_out_the_same(checkpoint):
    params = SamplingParams(max_tokens=8, detokenize=False)
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as one:
        alone = one.rollout(PROMPTS, params, num_samples=4, seed=2, use_tqdm=False)
    with RolloutPolicy.from_pretrained(checkpoint, num_replicas=2, **OPTIONS) as many:
        found = many.rollout(PROMPTS, params, num_samples=4, seed=2, use_tqdm=False)
    assert (found["tokens", "full"] == alone["tokens", "full"]).all()
    assert (found["log_probs", "full"] == alone["log_probs", "full"]).all()


@pytest.mark.slow
def test_replicas_start_anew_one_after_the_other_while_requests_go_on(fleet, expected):
    async def run():
        report = await fleet.update_weights(tiny_model().state_dict())
        before = [replica.pid for replica in await all_serve(fleet)]
        restart = asyncio.create_task(fleet.restart_replicas())
        while not restart.done():
            assert "SYNCED" in {replica.state for replica in await fleet.replicas()}
            assert await asyncio.gather(*(read(fleet, i) for i in range(len(PROMPTS)))) == expected
        await restart
        found = await all_serve(fleet)
        assert not set(before) & {replica.pid for replica in found}
        assert [replica.policy_version for replica in found] == [report.version] * 2

    asyncio.run(run())


@pytest.mark.slow
def test_a_replica_whose_weights_were_changed_by_something_else_starts_anew(checkpoint, caplog):
    extension = "tests.integration.sample_extensions:Sample"

    async def run(engine):
        before, digests = await all_serve(engine), await engine.collective_rpc("get_weight_digest")
        await engine.collective_rpc("double_weights")
        assert await engine.collective_rpc("get_weight_digest") != digests
        one = SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False, seed=1, output_kind="final_only")
        for i in range(8):
            assert len((await anext(engine.generate([5 + i], one))).outputs[0].token_ids) == 300
        found = await all_serve(engine)
        assert not {replica.pid for replica in before} & {replica.pid for replica in found}
        assert all("which no update of the fleet has given it" in replica.problem for replica in found)
        assert await engine.collective_rpc("get_weight_digest") == digests

    with AsyncLLM(checkpoint, num_replicas=2, worker_extensions=[extension], **OPTIONS) as engine:
        asyncio.run(run(engine))
    assert "is started anew: it computes with weights of version 1" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_that_was_changed_under_a_fleet_is_not_served(tmp_path):
    path = tiny_checkpoint(tmp_path / "model", max_position_embeddings=4096)

    async def run(engine):
        digests = await engine.collective_rpc("get_weight_digest")
        assert digests[0] == digests[1]
        tiny_model(seed=9).save_pretrained(path)
        os.kill((await all_serve(engine))[1].pid, signal.SIGKILL)
        while "has loaded other weights" not in (found := (await engine.replicas())[1]).problem:
            await asyncio.sleep(0.02)
        assert found.state == "STARTING"
        await engine.update_weights(tiny_model(seed=10).state_dict())
        await all_serve(engine)
        digests = await engine.collective_rpc("get_weight_digest")
        assert digests[0] == digests[1]

    with AsyncLLM(path, num_replicas=2, **OPTIONS) as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize(
    "num_replicas, said", [(0, "num_replicas=0"), (1.5, "num_replicas=1.5"), (10**6, "processors")]
)
def test_sizes_that_cannot_be_are_refused(checkpoint, num_replicas, said):
    with pytest.raises(ConfigError, match=said):
        AsyncLLM(checkpoint, num_replicas=num_replicas, **OPTIONS)


def test_what_a_fleet_cannot_do_is_told(fleet):
    async def run():
        weights = tiny_model().state_dict()
        with pytest.raises(LifecycleError, match="leave transport=None"):
            await fleet.update_weights(weights, transport="gloo")
        with pytest.raises(ConfigError, match="num_replicas=0"):
            await fleet.scale(0)
        with pytest.raises(LifecycleError, match="not one core"):
            print(fleet.address)

    asyncio.run(run())


def test_weights_change_by_updates_alone_and_a_refused_call_is_not_remembered(fleet):
    async def run():
        with pytest.raises(LifecycleError, match="begin_weight_update would change weights past the fleet"):
            await fleet.collective_rpc("begin_weight_update", args=[{}])
        orders = fleet.frontend.client._supervisor._orders
        with pytest.raises(LifecycleError, match="mode='later'"):
            await fleet.pause_generation(mode="later")
        assert fleet.frontend.client._supervisor._orders is orders

    asyncio.run(run())


@pytest.mark.slow
def test_a_replica_that_starts_later_has_the_newest_weights_whatever_their_version_and_no_others(fleet, tmp_path):
    async def restart():
        os.kill((await fleet.replicas())[1].pid, signal.SIGKILL)
        while (await fleet.replicas())[1].state == "SYNCED":
            await asyncio.sleep(0.01)

    async def run():
        await all_serve(fleet)
        await fleet.update_weights(tiny_model(seed=6).state_dict(), version=0, reset_version=True)
        await restart()
        await all_serve(fleet)
        digests = await fleet.collective_rpc("get_weight_digest")
        assert digests[0] == digests[1]
        sync.publish(tmp_path / "store", tiny_model(seed=7).state_dict(), 5)
        await fleet.update_weights(tmp_path / "store")
        sync.publish(tmp_path / "store", tiny_model(seed=8).state_dict(), 5, reset_version=True)
        await restart()
        while "holds other weights" not in (await fleet.replicas())[1].problem:
            assert (await fleet.replicas())[1].state != "SYNCED"
            await asyncio.sleep(0.05)
        await fleet.update_weights(tiny_model().state_dict())
        await all_serve(fleet)

    asyncio.run(run())
