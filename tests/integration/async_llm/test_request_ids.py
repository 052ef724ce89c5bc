"""A user's id is a label of one client's unfinished requests; whatever it looks like, the core knows numbers."""

import asyncio

import pytest

from rollout_engine import SamplingParams

PROMPT = [5, 6, 7]
TWO = dict(n=2, seed=11, max_tokens=40, ignore_eos=True)


async def stop_of_first_sample(engine, last_of):
    """Parameters with which a stop string ends sample 0 of two, and not sample 1."""
    first, second = (await last_of(engine, PROMPT, SamplingParams(**TWO))).outputs
    stop = next(letter for letter in first.text if letter not in second.text)
    return SamplingParams(**TWO, stop=[stop])


@pytest.mark.parametrize(("other", "n"), [("0_a", 2), ("1_a", 1)])
def test_a_stop_string_ends_no_request_whose_id_looks_like_a_sample(engine, last_of, other, n):
    async def run():
        params = SamplingParams(n=n, max_tokens=200, ignore_eos=True, detokenize=False)
        requests = (await stop_of_first_sample(engine, last_of), "a"), (params, other)
        return await asyncio.gather(*(last_of(engine, PROMPT, *each) for each in requests))

    outputs = asyncio.run(run())
    reasons = {output.request_id: [sample.finish_reason for sample in output.outputs] for output in outputs}
    assert reasons == {"a": ["stop", "length"], other: ["length"] * n}


def test_an_id_is_free_as_soon_as_its_request_has_finished(engine, collect):
    """A stop string ends a request here before the core knows of it."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, stop=[chr(code) for code in range(64, 128)])

    async def run():
        return [(await collect(engine, PROMPT, params, "again"))[-1].outputs[0].finish_reason for _ in range(60)]

    assert asyncio.run(run()) == ["stop"] * 60


def test_what_the_core_calls_a_request_can_be_asked_for_while_it_runs(engine):
    async def run():
        running = engine.generate(PROMPT, SamplingParams(n=3, max_tokens=30_000, ignore_eos=True), "a")
        await anext(running)
        (tables,) = await engine.collective_rpc("get_block_tables")
        ids = await engine.get_sequence_ids("a")
        await engine.abort(["1_a", "a"])
        outputs = [output async for output in running]
        return tables, ids, outputs[-1], await engine.get_sequence_ids("a")

    tables, ids, last, none = asyncio.run(run())
    assert len(ids) == 3 and tables and set(tables) <= set(ids) and none == []
    assert [sample.finish_reason for sample in last.outputs] == ["abort"] * 3
