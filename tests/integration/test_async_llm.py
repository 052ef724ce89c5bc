"""`AsyncLLM` over a real core process and a real tiny model: it gives what `LLM` gives, as a stream."""

import asyncio
import gc
import os
import time

import numpy as np
import pytest
import torch

from rollout_engine import (
    LLM,
    AsyncLLM,
    AsyncLLMEngine,
    ChecksumError,
    EngineDeadError,
    LifecycleError,
    ManifestMismatchError,
    RequestError,
    RewardError,
    RolloutPolicy,
    SamplingParams,
    StaleVersionError,
    WeightUpdateError,
)
from rollout_engine.testing import tiny_checkpoint, tiny_model
from sync import make_sender

PROMPTS = ["hello", "ab", "the quick brown fox jumps over the lazy dog", [5, 6, 7]]
OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """The shared engine, found running and empty, and left so."""
    yield shared
    asyncio.run(assert_empty(shared))


async def assert_empty(engine):
    await asyncio.wrap_future(engine.remote.call("check_integrity"))
    await asyncio.wrap_future(engine.remote.call("check_integrity"))
    deadline = time.monotonic() + 5
    while (await engine.check_health()).num_unfinished_requests and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert len(engine.remote.streams) == 0
    assert await engine.get_num_unfinished_requests() == 0
    assert await engine.get_cache_usage() == 0.0
    assert not await engine.is_paused()


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


async def collect(engine, prompt, params, request_id=None):
    return [output async for output in engine.generate(prompt, params, request_id)]


async def last_of(engine, prompt, params, request_id=None):
    return (await collect(engine, prompt, params, request_id))[-1]


def long_params(**changes):
    return SamplingParams(**(dict(max_tokens=1500, ignore_eos=True, detokenize=False) | changes))


def assert_same(ours, theirs):
    assert len(ours.outputs) == len(theirs.outputs)
    if theirs.prompt_logprobs is not None:
        assert np.array_equal(ours.prompt_logprobs, theirs.prompt_logprobs, equal_nan=True)
        for column, other in zip(ours.prompt_top_logprobs, theirs.prompt_top_logprobs, strict=True):
            assert np.array_equal(column, other, equal_nan=True)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert (a.index, a.token_ids, a.text, a.seed) == (b.index, b.token_ids, b.text, b.seed)
        assert (a.finish_reason, a.stop_reason, a.version_spans) == (b.finish_reason, b.stop_reason, b.version_spans)
        for ours_column, theirs_column in ((a.logprobs, b.logprobs), (a.kept_logprob_mass, b.kept_logprob_mass)):
            assert (ours_column is None) == (theirs_column is None)
            assert ours_column is None or np.array_equal(ours_column, theirs_column)
        assert a.top_logprobs is None or all(map(np.array_equal, a.top_logprobs, b.top_logprobs))


@pytest.mark.parametrize(
    "params",
    [
        dict(max_tokens=24, n=3, seed=5, logprobs=0),
        dict(max_tokens=24, seed=1, logprobs=2, top_k=20, top_p=0.9),
        dict(max_tokens=60, n=2, seed=2, stop=["a", "e", "\x00"], include_stop_str_in_output=True),
        dict(max_tokens=16, temperature=0.0, logprobs=3, output_kind="final_only"),
        dict(max_tokens=16, n=4, seed=9, logprobs=0, logprobs_mode="raw", output_kind="final_only"),
        dict(max_tokens=16, n=2, seed=9, prompt_logprobs=3, presence_penalty=1.0, logit_bias={9: 2.0}, bad_words=["a"]),
    ],
)
def test_results_equal_the_engine_in_process_token_for_token(engine, llm, params):
    params = SamplingParams(**params)

    async def run():
        return await asyncio.gather(*(last_of(engine, prompt, params) for prompt in PROMPTS))

    for ours, theirs in zip(asyncio.run(run()), llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert_same(ours, theirs)


def test_deltas_add_up_and_cumulative_outputs_grow(engine, llm):
    params = dict(max_tokens=40, seed=4, logprobs=0, n=2, ignore_eos=True)

    async def run():
        deltas = collect(engine, "hello", SamplingParams(**params, output_kind="delta"))
        cumulative = collect(engine, "hello", SamplingParams(**params))
        return await asyncio.gather(deltas, cumulative)

    deltas, cumulative = asyncio.run(run())
    (whole,) = llm.generate("hello", SamplingParams(**params), use_tqdm=False)
    assert len(deltas) > 2 and len(cumulative) > 2
    for index in range(2):
        parts = [sample for output in deltas for sample in output.outputs if sample.index == index]
        assert sum((part.token_ids for part in parts), []) == whole.outputs[index].token_ids
        assert "".join(part.text for part in parts) == whole.outputs[index].text
        logprobs = np.concatenate([part.logprobs for part in parts])
        assert np.array_equal(logprobs, whole.outputs[index].logprobs)
        grown = [len(s.token_ids) for output in cumulative for s in output.outputs if s.index == index]
        assert grown == sorted(grown) and grown[-1] == 40
    assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]


def test_a_reader_that_sleeps_gets_everything_at_once_when_it_wakes(engine):
    async def run():
        generator = engine.generate("hello", SamplingParams(max_tokens=50, ignore_eos=True, output_kind="delta"))
        first = await anext(generator)
        while (await engine.check_health()).num_unfinished_requests:
            await asyncio.sleep(0.01)
        rest = [output async for output in generator]
        assert len(rest) == 1 and rest[0].finished
        assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 50

    asyncio.run(run())


def test_abort_ends_a_request_with_what_it_had(engine):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", long_params(output_kind="final_only", n=2), "mine"))
        await until_computing(engine)
        await engine.abort("nobody's")
        await engine.abort(["mine", "mine"])
        return await task

    result = asyncio.run(run())
    assert [sample.finish_reason for sample in result.outputs] == ["abort", "abort"]
    assert all(0 < len(sample.token_ids) < 1500 for sample in result.outputs)


@pytest.mark.parametrize("how", ["cancel", "break", "drop", "aclose"])
def test_leaving_a_generator_aborts_its_request(engine, how):
    async def leave():
        generator = engine.generate("hello", long_params())
        await anext(generator)
        if how == "cancel":
            task = asyncio.create_task(anext_forever(generator))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif how == "break":
            async for _ in generator:
                break
        elif how == "aclose":
            await generator.aclose()
        del generator
        gc.collect()
        await asyncio.sleep(0)

    async def run():
        await leave()
        deadline = time.monotonic() + 5
        while await engine.get_num_unfinished_requests():
            assert time.monotonic() < deadline, "the request goes on without a reader"
            await asyncio.sleep(0.01)

    asyncio.run(run())


async def anext_forever(generator):
    async for _ in generator:
        pass


async def until_computing(engine):
    """Until the request that was just added has tokens."""
    while (await engine.get_cache_usage()) == 0:
        await asyncio.sleep(0.005)
    steps = (await engine.check_health()).num_steps
    while (await engine.check_health()).num_steps < steps + 3:
        await asyncio.sleep(0.005)


def test_bad_requests_are_refused_by_name_and_others_go_on(engine):
    async def run():
        running = asyncio.create_task(last_of(engine, "hello", SamplingParams(max_tokens=30, ignore_eos=True), "a"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"max_tokens=5000"):
            await last_of(engine, "hello", SamplingParams(max_tokens=5000))
        with pytest.raises(RequestError, match="request_id='a' is not allowed: must be unique"):
            await last_of(engine, "hello", None, "a")
        with pytest.raises(RequestError, match="priority"):
            await anext(engine.generate("hello", None, priority="high"))
        assert len((await running).outputs[0].token_ids) == 30

    asyncio.run(run())


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


def test_metrics_count_what_the_core_did_and_time_what_the_client_saw(engine):
    async def run():
        before = await engine.get_metrics()
        await last_of(engine, "hello", SamplingParams(max_tokens=10, ignore_eos=True))
        return before.core.counters.num_tokens_sampled, await engine.get_metrics()

    sampled, metrics = asyncio.run(run())
    assert metrics.core.counters.num_tokens_sampled == sampled + 10
    assert metrics.core.state == "RUNNING" and metrics.requests.finished["length"] > 0


def test_paused_with_keep_requests_freeze_and_go_on_to_the_same_tokens(engine, llm):
    params = SamplingParams(max_tokens=600, ignore_eos=True, seed=3)

    async def run():
        task = asyncio.create_task(last_of(engine, "hello", params))
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
        return await task

    (expected,) = llm.generate("hello", params, use_tqdm=False)
    assert_same(asyncio.run(run()), expected)


def test_pause_with_wait_returns_when_all_have_finished_and_with_abort_at_once(engine):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", SamplingParams(max_tokens=200, ignore_eos=True)))
        await until_computing(engine)
        await engine.pause_generation(wait_for_inflight_requests=True)
        assert await engine.get_num_unfinished_requests() == 0
        await engine.resume_generation()
        assert (await task).outputs[0].finish_reason == "length"
        aborted = asyncio.create_task(last_of(engine, "hello", long_params()))
        await until_computing(engine)
        await engine.pause_generation(mode="abort")
        assert (await aborted).outputs[0].finish_reason == "abort"
        queued = asyncio.create_task(last_of(engine, "hello", long_params(), "queued"))
        await asyncio.sleep(0.02)
        await engine.abort("queued")
        ended = (await queued).outputs[0]
        assert (ended.finish_reason, ended.token_ids) == ("abort", [])
        await engine.resume_generation()
        with pytest.raises(LifecycleError, match="mode='later'"):
            await engine.pause_generation(mode="later")

    asyncio.run(run())


def test_draining_waits_and_says_when_it_takes_too_long(engine):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", long_params()))
        await until_computing(engine)
        with pytest.raises(TimeoutError, match="still in flight"):
            await engine.wait_for_requests_to_drain(drain_timeout=0.01)
        await engine.wait_for_requests_to_drain()
        return await task

    assert len(asyncio.run(run()).outputs[0].token_ids) == 1500


def test_it_sleeps_and_wakes_and_forgets_prefixes(engine, llm):
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


def test_an_engine_made_inside_one_loop_serves_another_and_draws_as_in_process(checkpoint):
    options = OPTIONS | dict(skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=8, n=2)

    async def make():
        engine = AsyncLLMEngine(checkpoint, **options)
        return engine, await last_of(engine, [5, 6], params)

    with LLM(checkpoint, **options) as llm:
        expected = llm.generate([[5, 6], [5, 6]], params, use_tqdm=False)
    engine, first = asyncio.run(make())
    second = asyncio.run(last_of(engine, [5, 6], params))
    assert_same(first, expected[0])
    assert_same(second, expected[1])
    with pytest.raises(LifecycleError, match="skip_tokenizer_init"):
        asyncio.run(engine.get_tokenizer())
    address, pid = engine.address, engine.remote.ready.pid
    del engine  # garbage: its core ends with it
    gc.collect()
    assert_gone(address, pid)


def assert_gone(address, pid):
    assert not os.path.exists(address)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # not even a zombie


def test_two_clients_of_one_core_have_their_own_requests_under_the_same_names(engine, llm):
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=6, logprobs=0, n=2)

    async def run():
        with AsyncLLM.connect(engine.address) as other:
            assert other.client_index > engine.client_index
            mine, theirs = await asyncio.gather(
                last_of(engine, "hello", params, "same"), last_of(other, "ab", params, "same")
            )
            unseeded = await asyncio.gather(*(last_of(each, "ab", SamplingParams()) for each in (engine, other)))
            assert unseeded[0].outputs[0].seed != unseeded[1].outputs[0].seed
            left = asyncio.create_task(last_of(other, "ab", long_params()))
            await until_computing(engine)
            other.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await left
        return mine, theirs

    for ours, expected in zip(asyncio.run(run()), llm.generate(["hello", "ab"], params, use_tqdm=False), strict=True):
        assert_same(ours, expected)


def test_many_streams_leave_the_loop_free(shared):
    async def gaps(stop):
        found, last = [], time.perf_counter()
        while not stop.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            found.append(now - last - 0.001)
            last = now
        return found

    async def run():
        stop = asyncio.Event()
        ticker = asyncio.create_task(gaps(stop))
        params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0)
        results = await asyncio.gather(*(last_of(shared, [3 + i % 250, 4], params) for i in range(256)))
        stop.set()
        assert all(len(result.outputs[0].token_ids) == 64 for result in results)
        return await ticker

    found = asyncio.run(run())
    assert np.quantile(found, 0.9) < 0.05  # generous: the machine is shared; the benchmark measures it


def test_it_leaves_nothing_behind(checkpoint):
    engine = AsyncLLM(checkpoint, **OPTIONS)
    address, pid = engine.address, engine.remote.ready.pid
    assert os.stat(address).st_mode & 0o777 == 0o700
    engine.shutdown()
    engine.shutdown()
    assert engine.errored and engine.is_stopped and not engine.is_running
    assert_gone(address, pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(last_of(engine, "hello", None))
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(engine.check_health())


def tiny_weights(seed):
    return tiny_model(seed=seed).state_dict()


def test_new_weights_serve_the_tokens_of_an_engine_that_was_given_them_in_process(engine, checkpoint):
    params = SamplingParams(max_tokens=400, ignore_eos=True, seed=3, temperature=0.0)
    short = SamplingParams(max_tokens=20, seed=5, logprobs=0)

    async def run():
        task = asyncio.create_task(last_of(engine, "hello", params))
        await until_computing(engine)
        report = await engine.update_weights(tiny_weights(1))
        during = await task
        return report, during, await last_of(engine, "ab", short), await engine.update_weights(tiny_weights(0))

    report, during, after, back = asyncio.run(run())
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = llm.update_weights(tiny_weights(1))
        (same,) = llm.generate("ab", short, use_tqdm=False)
    assert (report.version, report.digest, report.num_bytes) == (1, expected.digest, expected.num_bytes)
    assert report.num_in_flight == 1 and back.version == engine.policy_version == 2
    assert_same(after, same)
    spans = during.outputs[0].version_spans
    assert [span.policy_version for span in spans] == [0, 1] and spans[-1].end == 400


def test_refused_weights_change_nothing_and_the_next_ones_are_taken(engine):
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


def test_an_update_whose_sender_leaves_is_given_up(engine):
    async def run():
        with AsyncLLM.connect(engine.address) as other:
            sender = make_sender("inproc")
            manifest = sender.offer(tiny_weights(1), 99, await other.get_model_metadata())
            assert await other._call(
                "begin_weight_transfer", bool, manifest=manifest, kv="keep", reset_version=False, timeout=60.0
            )
            with pytest.raises(LifecycleError, match="UPDATING"):
                await engine.update_weights(tiny_weights(1))
        while (await engine.get_metrics()).core.state == "UPDATING":
            await asyncio.sleep(0.01)
        version = engine.policy_version
        assert (await engine.update_weights(tiny_weights(0))).version == version + 1

    asyncio.run(run())


@pytest.mark.parametrize("name", ["nothing", "__init__", "_core", "run", "shutdown", "check_health.__globals__"])
def test_only_registered_names_can_be_called(engine, name):
    with pytest.raises(RequestError, match="Unknown utility"):
        asyncio.run(engine._call(name))


def test_arguments_of_calls_are_checked_on_both_sides(engine):
    with pytest.raises(TypeError, match="no place in a message"):
        asyncio.run(engine._call("sleep", level=print, mode="abort"))
    with pytest.raises(RequestError, match="level"):
        asyncio.run(engine._call("sleep", level="deep", mode="abort"))
    with pytest.raises(RequestError, match="more"):
        asyncio.run(engine._call("check_health", more=1))
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
        async for _ in far.arollout([[5]] * 8, SamplingParams(max_tokens=1500, ignore_eos=True), num_samples=2):
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
