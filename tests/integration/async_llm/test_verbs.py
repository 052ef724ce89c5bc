"""What `AsyncLLM` does besides generating: scores, pauses, sleeps, takes weights, serves a policy."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import (
    LLM,
    ChecksumError,
    DirtyWeightsError,
    LifecycleError,
    ManifestMismatchError,
    RequestError,
    RewardError,
    RolloutPolicy,
    SamplingParams,
    StaleVersionError,
    WeightUpdateError,
)
from rollout_engine.children.values import pack
from rollout_engine.testing import tiny_model

PROMPTS = ["hello", "ab", "the quick brown fox jumps over the lazy dog", [5, 6, 7]]


ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, seed=3, logprobs=0, detokenize=False)
"""For a request that goes on until somebody ends it: a minute's work."""


def tiny_weights(seed):
    return tiny_model(seed=seed).state_dict()


def test_scores_and_metadata_equal_those_in_process(engine, llm):
    async def run():
        scores = await engine.score([[5, 6, 7], [8]], [[9, 10], []], temperature=0.7)
        with pytest.raises(RequestError, match=r"completion_token_ids\[0\]"):
            await engine.score([[5]], [[999]])
        return scores, await engine.get_model_metadata(), await engine.get_tokenizer()

    scores, metadata, tokenizer = asyncio.run(run())
    expected = llm.score([[5, 6, 7], [8]], [[9, 10], []], temperature=0.7)
    assert all(map(np.array_equal, scores, expected))
    assert metadata == llm.get_model_metadata()
    assert tokenizer.get_vocab() == llm.get_tokenizer().get_vocab()


def test_conversations_and_recommended_settings_are_those_in_process(engine, llm, last_of):
    prompt = {"messages": [{"role": "user", "content": "hi"}], "continue_final_message": True}
    params = {"max_tokens": 4, "temperature": 0}
    output = asyncio.run(last_of(engine, prompt, params))
    (expected,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt == expected.prompt == "<|user|>hi"
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(RequestError, match="Hugging Face's .* give max_tokens"):
        asyncio.run(anext(engine.generate("a", max_new_tokens=5)))
    assert asyncio.run(engine.get_default_sampling_params()) == llm.get_default_sampling_params() == SamplingParams()


def test_metrics_count_what_the_core_did_and_time_what_the_client_saw(engine, last_of):
    async def run():
        before = await engine.get_metrics()
        await last_of(engine, "hello", SamplingParams(max_tokens=10, ignore_eos=True))
        return before.core.counters.num_tokens_sampled, await engine.get_metrics()

    sampled, metrics = asyncio.run(run())
    assert metrics.core.counters.num_tokens_sampled == sampled + 10
    assert metrics.core.state == "RUNNING" and metrics.requests.finished["length"] > 0


def test_paused_with_keep_requests_freeze_and_go_on_to_the_same_tokens(engine, llm, last_of, until_computing):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", ENDLESS, "endless"))
        await until_computing(engine)
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        steps = (await engine.check_health()).num_steps
        queued = asyncio.create_task(last_of(engine, "ab", SamplingParams(max_tokens=3, ignore_eos=True)))
        await asyncio.sleep(0.05)
        assert (await engine.check_health()).num_steps == steps and not task.done() and not queued.done()
        with pytest.raises(LifecycleError, match="frozen"):
            await engine.wait_for_requests_to_drain()
        await engine.resume_generation()
        assert len((await queued).outputs[0].token_ids) == 3
        await until_computing(engine, num_steps=100)
        await engine.abort("endless")
        return (await task).outputs[0]

    ours = asyncio.run(run())
    params = msgspec.structs.replace(ENDLESS, max_tokens=len(ours.token_ids))
    (theirs,) = llm.generate("hello", params, use_tqdm=False)[0].outputs
    assert len(ours.token_ids) > 50 and ours.token_ids == theirs.token_ids
    assert np.array_equal(ours.logprobs, theirs.logprobs)


def test_pause_with_wait_returns_when_all_have_finished_and_with_abort_at_once(engine, last_of, until_computing):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", SamplingParams(max_tokens=200, ignore_eos=True)))
        await until_computing(engine)
        await engine.pause_generation(wait_for_inflight_requests=True)
        assert await engine.get_num_unfinished_requests() == 0
        await engine.resume_generation()
        assert (await task).outputs[0].finish_reason == "length"
        aborted = asyncio.create_task(last_of(engine, "hello", ENDLESS))
        await until_computing(engine)
        await engine.pause_generation(mode="abort")
        assert (await aborted).outputs[0].finish_reason == "abort"
        queued = asyncio.create_task(last_of(engine, "hello", ENDLESS, "queued"))
        await asyncio.sleep(0.02)
        await engine.abort("queued")
        ended = (await queued).outputs[0]
        assert (ended.finish_reason, ended.token_ids) == ("abort", [])
        await engine.resume_generation()
        with pytest.raises(LifecycleError, match="mode='later'"):
            await engine.pause_generation(mode="later")

    asyncio.run(run())


def test_draining_waits_and_says_when_it_takes_too_long(engine, last_of, until_computing):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", ENDLESS, "endless"))
        await until_computing(engine)
        with pytest.raises(TimeoutError, match="still in flight"):
            await engine.wait_for_requests_to_drain(drain_timeout=0.01)
        await until_computing(engine)  # it goes on
        draining = asyncio.create_task(engine.wait_for_requests_to_drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        await engine.abort("endless")
        await draining
        return await task

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"


def test_it_sleeps_and_wakes_and_forgets_prefixes(engine, llm, last_of):
    params = SamplingParams(max_tokens=12, seed=8)

    async def run():
        before = await last_of(engine, "hello", params)
        await engine.sleep(level=1)
        assert await engine.is_sleeping()
        await engine.wake_up()
        assert not await engine.is_sleeping()
        assert await engine.reset_prefix_cache()
        return before, await last_of(engine, "hello", params)

    before, after = asyncio.run(run())
    assert before.outputs[0].token_ids == after.outputs[0].token_ids


def test_a_deep_sleep_with_requests_in_flight_fails_no_step_and_says_afterwards_what_it_forgot(
    engine, last_of, until_computing
):
    async def failed_steps():
        return (await engine.get_metrics()).core.counters.num_failed_steps

    async def run():
        before = await failed_steps()
        running = [asyncio.create_task(last_of(engine, [5, 6], ENDLESS, f"r{i}")) for i in range(3)]
        await until_computing(engine)
        await engine.sleep(level=2, mode="abort")
        reasons = [(await each).outputs[0].finish_reason for each in running]
        await engine.wake_up()
        with pytest.raises(
            DirtyWeightsError, match=r"incomplete: sleep\(level=2\) forgot them. Send a complete update"
        ):
            await last_of(engine, "ab", SamplingParams(max_tokens=2))
        await engine.update_weights(tiny_weights(0), version=engine.policy_version)
        await last_of(engine, "ab", SamplingParams(max_tokens=2))
        return reasons, await failed_steps() - before

    assert asyncio.run(run()) == (["abort"] * 3, 0)


def test_new_weights_serve_the_tokens_of_an_engine_that_was_given_them_in_process(
    engine, checkpoint, last_of, until_computing, options
):
    short = SamplingParams(max_tokens=20, seed=5, logprobs=0)
    version = engine.policy_version

    async def run():
        task = asyncio.create_task(last_of(engine, "hello", ENDLESS, "endless"))
        await until_computing(engine)
        report = await engine.update_weights(tiny_weights(1))
        await until_computing(engine)
        await engine.abort("endless")
        during = await task
        return report, during, await last_of(engine, "ab", short), await engine.update_weights(tiny_weights(0))

    report, during, after, back = asyncio.run(run())
    with LLM(checkpoint, **options) as llm:
        expected = llm.update_weights(tiny_weights(1))
        (same,) = llm.generate("ab", short, use_tqdm=False)
    assert (report.version, report.digest, report.num_bytes) == (version + 1, expected.digest, expected.num_bytes)
    assert report.num_in_flight == 1 and back.version == engine.policy_version == version + 2
    assert after.outputs[0].token_ids == same.outputs[0].token_ids
    assert np.array_equal(after.outputs[0].logprobs, same.outputs[0].logprobs)
    spans = during.outputs[0].version_spans
    assert [span.policy_version for span in spans] == [version, version + 1]


def test_refused_weights_change_nothing_and_the_next_ones_are_taken(engine, last_of, assert_same):
    params = SamplingParams(max_tokens=20, seed=5, logprobs=0)
    bad = tiny_weights(1) | {"model.norm.weight": torch.full((64,), float("nan"))}
    missing = tiny_weights(1)
    del missing["model.norm.weight"]

    async def run():
        before, version = await last_of(engine, "ab", params), engine.policy_version
        for source, error, match in (
            (bad, ChecksumError, "NaN"),
            (missing, ManifestMismatchError, "model.norm.weight"),
            ({"x": 3}, ManifestMismatchError, "'x'"),
        ):
            with pytest.raises(error, match=match):
                await engine.update_weights(source)
        with pytest.raises(StaleVersionError):
            await engine.update_weights(tiny_weights(1), version=0)
        with pytest.raises(WeightUpdateError, match="kv='drop'"):
            await engine.update_weights(tiny_weights(1), kv="drop")
        after = await last_of(engine, "ab", params)
        assert engine.policy_version == version
        assert_same(before, after)
        await engine.update_weights(tiny_weights(0))

    asyncio.run(run())


def ask_unchecked(engine, name, **arguments):
    """Call a verb of the core without the checks of the client."""
    return engine.frontend.client._socket.call(name, pack(arguments), Any).result(60)


@pytest.mark.parametrize(
    "name", ["apply_model", "nothing", "__init__", "_core", "run", "shutdown", "check_health.__globals__"]
)
def test_only_registered_names_can_be_called(engine, name):
    with pytest.raises(RequestError, match="Unknown verb"):
        ask_unchecked(engine, name)


def test_arguments_of_calls_are_checked_on_both_sides(engine):
    with pytest.raises(RequestError, match="sleep: an argument cannot be sent"):
        asyncio.run(engine.sleep(level=print, mode="abort"))
    with pytest.raises(RequestError, match="level"):
        ask_unchecked(engine, "sleep", level="deep", mode="abort")
    with pytest.raises(RequestError, match="more"):
        ask_unchecked(engine, "check_health", more=1)
    asyncio.run(engine.check_health())


def test_a_policy_over_it_rolls_out_what_one_in_process_does(engine, llm):
    near, far = RolloutPolicy(llm), RolloutPolicy(engine)
    arguments = dict(
        num_samples=3, seed=4, use_tqdm=False, reward_fn=lambda prompts, completions, completion_ids: [1.0] * 3
    )
    ours = far.rollout(PROMPTS, SamplingParams(max_tokens=12), **arguments)
    theirs = near.rollout(PROMPTS, SamplingParams(max_tokens=12), **arguments)
    for key in (("tokens", "full"), ("log_probs", "full"), "seed", "group_id", ("next", "reward")):
        assert torch.equal(ours[key], theirs[key])
    assert list(ours["text", "response"]) == list(theirs["text", "response"])
    assert torch.equal(far.score(ours), near.score(theirs))

    async def run():
        groups = [group async for group in far.arollout(PROMPTS, SamplingParams(max_tokens=12), num_samples=3, seed=4)]
        assert sorted(int(group["group_id"][0]) for group in groups) == [0, 1, 2, 3]
        lengths = [SamplingParams(max_tokens=2, ignore_eos=True), *[ENDLESS] * 7]
        async for _ in far.arollout([[5]] * 8, lengths, num_samples=2):
            break

    asyncio.run(run())
    with pytest.raises(RewardError):
        far.rollout("hello", SamplingParams(max_tokens=2), use_tqdm=False, reward_fn=lambda *a, **k: 1 / 0)
    far.pause_generation()
    assert far.is_paused()
    with pytest.raises(LifecycleError, match="rollout"):
        far.rollout("hello", use_tqdm=False)
    far.resume_generation()
    assert far.update_weights(tiny_weights(0)).version == far.policy_version
