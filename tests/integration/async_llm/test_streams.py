"""`AsyncLLM` over a real core process and a real tiny model: it gives what `LLM` gives, as a stream."""

import asyncio
import gc
import os

import numpy as np
import pytest

from rollout_engine import (
    LLM,
    AsyncLLM,
    AsyncLLMEngine,
    EngineDeadError,
    LifecycleError,
    RequestError,
    SamplingParams,
)

PROMPTS = ["hello", "ab", "the quick brown fox jumps over the lazy dog", [5, 6, 7]]


def endless(**changes):
    """For a request that goes on until somebody ends it: a minute's work."""
    return SamplingParams(**(dict(max_tokens=30_000, ignore_eos=True, detokenize=False) | changes))


class Recorder:
    """A stat logger."""

    is_closed = False

    def attach(self, read):
        self.read = read

    def log(self, metrics, seconds):
        self.last = metrics

    def close(self):
        self.is_closed = True


async def anext_forever(generator):
    async for _ in generator:
        pass


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "params",
    [
        dict(max_tokens=24, n=3, seed=5, logprobs=0),
        dict(max_tokens=24, seed=1, logprobs=2, top_k=20, top_p=0.9),
        dict(max_tokens=60, n=2, seed=2, stop=["a", "e", "\x00"], include_stop_str_in_output=True),
        dict(max_tokens=16, temperature=0.0, logprobs=3, output_kind="final_only"),
        dict(max_tokens=16, n=4, seed=9, logprobs=0, logprobs_mode="raw", output_kind="final_only"),
        dict(max_tokens=8, n=2, seed=3, logprobs=-1, logprob_token_ids=[7, 3], stop_regex=["[x-z]{2}"]),
        dict(max_tokens=16, n=2, seed=9, prompt_logprobs=3, presence_penalty=1.0, logit_bias={9: 2.0}, bad_words=["a"]),
    ],
)
def test_results_equal_the_engine_in_process_token_for_token(engine, llm, params, last_of, assert_same):
    params = SamplingParams(**params)

    async def run():
        return await asyncio.gather(*(last_of(engine, prompt, params) for prompt in PROMPTS))

    for ours, theirs in zip(asyncio.run(run()), llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert_same(ours, theirs)


def test_deltas_add_up_and_cumulative_outputs_grow(engine, llm, collect):
    params = dict(max_tokens=400, seed=4, logprobs=0, n=2, ignore_eos=True)

    async def run():
        deltas = collect(engine, "hello", SamplingParams(**params, output_kind="delta"))
        cumulative = collect(engine, "hello", SamplingParams(**params))
        return await asyncio.gather(deltas, cumulative)

    deltas, cumulative = asyncio.run(run())
    (whole,) = llm.generate("hello", SamplingParams(**params), use_tqdm=False)
    for index in range(2):
        parts = [sample for output in deltas for sample in output.outputs if sample.index == index]
        assert sum((part.token_ids for part in parts), []) == whole.outputs[index].token_ids
        assert "".join(part.text for part in parts) == whole.outputs[index].text
        logprobs = np.concatenate([part.logprobs for part in parts])
        assert np.array_equal(logprobs, whole.outputs[index].logprobs)
        grown = [len(s.token_ids) for output in cumulative for s in output.outputs if s.index == index]
        assert grown == sorted(grown) and grown[-1] == 400
    assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]


def test_a_reader_that_sleeps_gets_everything_at_once_when_it_wakes(engine):
    async def run():
        generator = engine.generate("hello", SamplingParams(max_tokens=50, ignore_eos=True, output_kind="delta"))
        first = await anext(generator)
        while (await engine.check_health()).num_unfinished_requests:
            await asyncio.sleep(0.01)
        outputs = [first, *[output async for output in generator]]
        assert len(outputs) == 2 - first.finished and outputs[-1].finished  # a busy loop's first may be all
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 50

    asyncio.run(run())


def test_abort_ends_a_request_with_what_it_had(engine, last_of, until_computing):
    async def run():
        task = asyncio.create_task(last_of(engine, "hello", endless(output_kind="final_only", n=2), "mine"))
        await until_computing(engine)
        await engine.abort("nobody's")
        await engine.abort(["mine", "mine"])
        return await task

    result = asyncio.run(run())
    assert [sample.finish_reason for sample in result.outputs] == ["abort", "abort"]
    assert all(sample.token_ids for sample in result.outputs)


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", ["cancel", "break", "drop", "aclose"])
def test_leaving_a_generator_aborts_its_request(engine, how, collect):
    async def leave():
        generator = engine.generate("hello", endless())
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

    async def num_sampled():
        return (await engine.get_metrics()).core.counters.num_tokens_sampled

    async def run():
        before = await num_sampled()
        await leave()
        while await engine.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        assert await num_sampled() - before < endless().max_tokens, "the request went on without a reader"

    asyncio.run(run())


def test_bad_requests_are_refused_by_name_and_others_go_on(engine, last_of):
    async def run():
        running = asyncio.create_task(last_of(engine, "hello", endless(), "a"))
        ending = asyncio.create_task(last_of(engine, "hello", SamplingParams(max_tokens=30, ignore_eos=True)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"max_tokens=50000"):
            await last_of(engine, "hello", SamplingParams(max_tokens=50_000))
        with pytest.raises(RequestError, match="request_id='a' is not allowed: must be unique"):
            await last_of(engine, "hello", None, "a")
        with pytest.raises(RequestError, match="priority"):
            await anext(engine.generate("hello", None, priority="high"))
        assert len((await ending).outputs[0].token_ids) == 30
        await engine.abort("a")
        assert (await running).outputs[0].finish_reason == "abort"

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_made_inside_one_loop_serves_another_and_draws_as_in_process(
    checkpoint, collect, last_of, assert_same, assert_gone, options
):
    options = options | dict(skip_tokenizer_init=True)
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
    address, pid = engine.address, engine.frontend.client.pid
    del engine  # garbage: its core ends with it
    gc.collect()
    assert_gone(address, pid)


def test_two_clients_of_one_core_have_their_own_requests_under_the_same_names(
    engine, llm, last_of, until_computing, assert_same
):
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=6, logprobs=0, n=2)

    async def run():
        with AsyncLLM.connect(engine.address) as other:
            assert other.client_index > engine.client_index
            mine, theirs = await asyncio.gather(
                last_of(engine, "hello", params, "same"), last_of(other, "ab", params, "same")
            )
            unseeded = await asyncio.gather(*(last_of(each, "ab", SamplingParams()) for each in (engine, other)))
            assert unseeded[0].outputs[0].seed != unseeded[1].outputs[0].seed
            left = asyncio.create_task(last_of(other, "ab", endless()))
            await until_computing(engine)
            other.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await left
        return mine, theirs

    for ours, expected in zip(asyncio.run(run()), llm.generate(["hello", "ab"], params, use_tqdm=False), strict=True):
        assert_same(ours, expected)


def test_many_streams_leave_the_loop_free(shared):
    """Other work of the loop waits for a few readers, never for all."""
    served = set()

    async def read(i):
        params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0, output_kind="delta")
        num_tokens = 0
        async for output in shared.generate([3 + i % 250, 4], params):
            served.add(i)
            num_tokens += len(output.outputs[0].token_ids)
        return num_tokens

    async def run():
        readers, most = [asyncio.create_task(read(i)) for i in range(256)], 0
        await asyncio.sleep(0)  # all have asked
        while not all(reader.done() for reader in readers):
            served.clear()
            await asyncio.sleep(0)
            most = max(most, len(served))
        return most, [reader.result() for reader in readers]

    most, num_tokens = asyncio.run(run())
    assert num_tokens == [64] * 256
    assert 0 < most <= 64


def test_it_leaves_nothing_behind(checkpoint, last_of, assert_gone, options):
    log = Recorder()
    engine = AsyncLLM(checkpoint, stat_loggers=[log], **options)
    asyncio.run(last_of(engine, "hello", SamplingParams(max_tokens=5, ignore_eos=True)))
    asyncio.run(engine.do_log_stats())
    assert log.read().core.counters.num_tokens_sampled == log.last.core.counters.num_tokens_sampled == 5
    address, pid = engine.address, engine.frontend.client.pid
    assert os.stat(address).st_mode & 0o777 == 0o700
    engine.shutdown()
    engine.shutdown()
    assert engine.errored and engine.is_stopped and not engine.is_running
    assert_gone(address, pid)
    assert log.is_closed
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(last_of(engine, "hello", None))
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(engine.check_health())
