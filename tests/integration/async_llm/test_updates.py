"""Weights for a core in another process: by every transport and from every kind of source, while tokens flow."""

import asyncio
import threading

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import LLM, AsyncLLM, DrainTimeoutError, RolloutPolicy, SamplingParams, errors
from rollout_engine.testing import tiny_model
from sync import publish

SHORT = SamplingParams(max_tokens=20, seed=5, logprobs=0)
ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, seed=3, logprobs=0, detokenize=False)
"""For a request that goes on until somebody ends it: a minute's work."""


def tiny_weights(seed):
    return tiny_model(seed=seed).state_dict()


@pytest.fixture(scope="module")
def expected(checkpoint, options):
    """Seed -> digest and sample of an engine in process with those weights."""
    found = {}
    with LLM(checkpoint, **options) as llm:
        for seed in (0, 1, 2):
            report = llm.update_weights(tiny_weights(seed))
            found[seed] = report.digest, llm.generate("ab", SHORT, use_tqdm=False)[0].outputs[0].token_ids
    return found


def test_names_of_other_checkpoints_of_the_model_are_taken(engine, expected):
    stray = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    for seed in (1, 0):
        weights = {name.removeprefix("model."): tensor for name, tensor in tiny_weights(seed).items()}
        assert asyncio.run(engine.update_weights(weights | stray)).digest == expected[seed][0]


@pytest.mark.quick(2)
@pytest.mark.parametrize("transport", [None, "shm", "store", "gloo"])
def test_every_transport_gives_the_weights_of_an_engine_in_process(engine, last_of, expected, transport):
    async def run():
        for seed in (1, 2, 0):
            report = await engine.update_weights(tiny_weights(seed), transport=transport)
            digest, token_ids = expected[seed]
            assert report.digest == digest and report.version == engine.policy_version
            assert (await last_of(engine, "ab", SHORT)).outputs[0].token_ids == token_ids

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["shm", "store", "gloo"])
def test_a_part_of_the_weights_reaches_the_core(engine, expected, transport):
    old, new = tiny_weights(1), tiny_weights(2)
    names = [name for name in new if "layers.0" in name]

    async def run():
        await engine.update_weights(old)
        parts = [{name: new[name] for name in names}, {name: new[name] for name in new if name not in names}]
        for part in parts:
            report = await engine.update_weights(part, partial=True, transport=transport)
            assert report.num_tensors <= len(part)
        assert report.digest == expected[2][0]
        with pytest.raises(errors.ManifestMismatchError, match="partial=True"):
            await engine.update_weights(parts[0], transport=transport)

    asyncio.run(run())


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["module", "iterator", "checkpoint", "store", "store in float64"])
def test_every_kind_of_source_gives_the_same_weights(engine, expected, tmp_path, kind):
    model = tiny_model(seed=1)
    version = engine.policy_version + 5
    if kind == "checkpoint":
        model.save_pretrained(tmp_path)
    elif kind.startswith("store"):
        publish(tmp_path, model.double() if "64" in kind else model, version)
    source = {"module": model, "iterator": iter(model.state_dict().items())}.get(kind, tmp_path)
    expected_version = version if kind.startswith("store") else engine.policy_version + 1

    async def run():
        report = await engine.update_weights(source)
        assert (report.digest, report.version) == (expected[1][0], expected_version)
        if kind != "iterator":
            assert (await engine.update_weights(source, version=expected_version)).num_bytes == 0
        await engine.update_weights(tiny_weights(0))

    asyncio.run(run())


def test_a_store_is_followed_version_by_version_and_an_old_one_is_refused(engine, tmp_path):
    async def run():
        first = engine.policy_version + 1
        for version in (first, first + 1):
            publish(tmp_path, tiny_weights(version % 2), version)
            assert (await engine.update_weights(tmp_path)).version == version
        await engine.update_weights(tiny_weights(0))
        with pytest.raises(errors.StaleVersionError, match=f"Version {first + 1} is older"):
            await engine.update_weights(tmp_path)

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["nccl", "ipc", "inproc", "smoke"])
def test_a_transport_that_does_not_reach_the_core_is_refused(engine, transport):
    version = engine.policy_version
    with pytest.raises(errors.WeightUpdateError, match=transport):
        asyncio.run(engine.update_weights(tiny_weights(1), transport=transport))
    with pytest.raises(errors.LifecycleError, match="reads a path itself"):
        asyncio.run(engine.update_weights("/tmp", transport="shm"))
    assert engine.policy_version == version


def test_requests_finish_under_the_old_weights_and_new_ones_wait(engine, last_of, until_computing):
    async def run():
        version = engine.policy_version
        endless = asyncio.create_task(last_of(engine, "hello", ENDLESS, "endless"))
        tasks = [asyncio.create_task(last_of(engine, "ab", SHORT))]
        await until_computing(engine)
        update = asyncio.create_task(engine.update_weights(tiny_weights(1), mode="wait"))
        while tasks[-1].done() or len(tasks) == 1:
            tasks.append(asyncio.create_task(last_of(engine, "ab", SHORT)))
            for _ in range(3):  # one that came late has finished by then, unless it waits
                await until_computing(engine, num_steps=3 * SHORT.max_tokens)
        await engine.abort("endless")
        spans = [(await task).outputs[0].version_spans for task in tasks]
        versions = [[span.policy_version for span in each] for each in spans]
        assert [span.policy_version for span in (await endless).outputs[0].version_spans] == [version]
        assert versions[0] == [version] and versions[-1] == [version + 1]
        assert versions == sorted(versions) and all(len(each) == 1 for each in versions)
        assert (await update).version == version + 1
        await engine.update_weights(tiny_weights(0))

    asyncio.run(run())


def test_requests_that_do_not_finish_in_time_go_on_under_the_old_weights(engine, last_of, until_computing):
    async def run():
        version = engine.policy_version
        old = asyncio.create_task(last_of(engine, "hello", ENDLESS, "old"))
        await until_computing(engine)
        with pytest.raises((DrainTimeoutError, errors.TransferTimeoutError), match="in flight|deadline"):
            await engine.update_weights(tiny_weights(1), mode="wait", timeout=0.05)
        await until_computing(engine)
        await engine.abort("old")
        assert [span.policy_version for span in (await old).outputs[0].version_spans] == [version]
        assert (await last_of(engine, "ab", SHORT)).outputs[0].version_spans[0].policy_version == version

    asyncio.run(run())


def test_aborted_requests_resume_from_their_tokens_under_the_new_weights(engine, last_of, until_computing):
    async def run():
        old = asyncio.create_task(last_of(engine, [5, 6, 7], ENDLESS))
        await until_computing(engine)
        await engine.update_weights(tiny_weights(1), mode="abort")
        (ended,) = (await old).outputs
        assert ended.finish_reason == "abort" and ended.token_ids
        rest = SamplingParams(max_tokens=30, ignore_eos=True, seed=ended.seed, detokenize=False)
        resumed = (await last_of(engine, [5, 6, 7, *ended.token_ids], rest)).outputs[0].token_ids
        await engine.update_weights(tiny_weights(0), mode="abort")
        return ended, resumed

    ended, resumed = asyncio.run(run())
    assert len(resumed) == 30


def test_a_second_trainer_is_refused_while_one_is_at_work(engine):
    begun, go_on = threading.Event(), threading.Event()

    def slowly():
        begun.set()
        assert go_on.wait(60)
        yield from tiny_weights(1).items()

    async def run():
        version = engine.policy_version
        first = asyncio.create_task(engine.update_weights(slowly()))
        assert await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(errors.LifecycleError, match="another update is under way"):
            await engine.update_weights(tiny_weights(2))
        go_on.set()
        assert (await first).version == version + 1
        await engine.update_weights(tiny_weights(0))

    asyncio.run(run())


def test_of_trainers_at_once_each_is_taken_whole_or_refused(engine):
    async def run(other):
        version = engine.policy_version
        engines = (engine, engine, other, other) * 2
        # All differ: the same weights again, under the version that is live by then, would be a no-op and no refusal.
        updates = [each.update_weights(tiny_weights(seed)) for seed, each in enumerate(engines, 1)]
        results = await asyncio.gather(*updates, return_exceptions=True)
        reports = [result for result in results if not isinstance(result, Exception)]
        refused = [result for result in results if isinstance(result, Exception)]
        assert reports
        assert all(isinstance(each, (errors.LifecycleError, errors.StaleVersionError)) for each in refused)
        versions = sorted(report.version for report in reports)
        assert versions == list(range(version + 1, version + 1 + len(reports)))
        assert (await engine.update_weights(tiny_weights(0))).version == versions[-1] + 1

    with AsyncLLM.connect(engine.address) as other:
        asyncio.run(run(other))


def test_tokens_after_recompute_equal_a_fresh_engines_bit_for_bit(
    engine, last_of, until_computing, checkpoint, options
):
    async def run():
        await engine.update_weights(tiny_weights(0))
        running = asyncio.create_task(last_of(engine, [5, 6, 7], ENDLESS, "endless"))
        await until_computing(engine)
        report = await engine.update_weights(tiny_weights(1), kv="recompute")
        assert report.num_in_flight == 1
        await until_computing(engine, num_steps=100)
        await engine.abort("endless")
        (output,) = (await running).outputs
        await engine.update_weights(tiny_weights(0))
        return output

    output = asyncio.run(run())
    old, new = output.version_spans
    assert new.policy_version == new.kv_min_version == old.policy_version + 1
    assert new.end - new.start > 50
    rest = msgspec.structs.replace(ENDLESS, max_tokens=new.end - new.start, seed=output.seed)
    with LLM(checkpoint, **options) as llm:
        llm.update_weights(tiny_weights(1))
        (fresh,) = llm.generate([[5, 6, 7, *output.token_ids[: new.start]]], rest, use_tqdm=False)[0].outputs
    assert output.token_ids[new.start :] == fresh.token_ids
    assert np.array_equal(output.logprobs[new.start :], fresh.logprobs)


def test_requests_that_come_while_weights_are_overwritten_wait_for_the_end(engine, last_of, expected):
    async def run():
        results = []
        for seed in (1, 0):
            update = asyncio.create_task(engine.update_weights(tiny_weights(seed), staging="inplace"))
            while not update.done():
                results.append(await last_of(engine, "ab", SHORT))
            await update
        return results

    results = asyncio.run(run())
    assert results and all(result.outputs[0].finish_reason in ("stop", "length") for result in results)


def test_updates_in_place_reach_the_core_and_a_failure_stops_it_until_a_complete_one(engine, last_of, expected):
    bad = tiny_weights(1) | {"model.norm.weight": torch.full((64,), float("nan"))}

    async def run():
        report = await engine.update_weights(tiny_weights(1), staging="inplace")
        assert (report.staging, report.digest) == ("inplace", expected[1][0])
        assert (await last_of(engine, "ab", SHORT)).outputs[0].token_ids == expected[1][1]
        with pytest.raises(errors.DirtyWeightsError, match="NaN"):
            await engine.update_weights(bad, staging="inplace")
        with pytest.raises(errors.DirtyWeightsError):
            await last_of(engine, "ab", SHORT)
        assert (await engine.update_weights(tiny_weights(0))).digest == expected[0][0]
        assert (await last_of(engine, "ab", SHORT)).outputs[0].token_ids == expected[0][1]

    asyncio.run(run())


def test_a_policy_takes_every_option(engine):
    policy = RolloutPolicy(engine)
    report = policy.update_weights(tiny_weights(0), mode="wait", kv="recompute", staging="shadow", transport="store")
    assert report.version == policy.policy_version
