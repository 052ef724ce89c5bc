"""Arguments that no request or call can have: their own caller is told what is wrong, whatever way they were made."""

import asyncio

import msgspec
import pytest

from rollout_engine import RequestError, RolloutEngineError, SamplingParams

PARAMS = SamplingParams(max_tokens=3)
HALF_A_PAIR = "\ud800"
"""No text: it cannot be encoded."""


@pytest.mark.parametrize(
    "wrong", [{"output_kind": "final"}, {"n": 0}, {"stop_token_ids": [1.5]}, {"temperature": "x"}, {"top_k": 2**70}]
)
def test_parameters_that_were_replaced_without_a_check_are_checked_at_the_door(engine, llm, last_of, wrong):
    params = msgspec.structs.replace(PARAMS, **wrong)
    with pytest.raises(RequestError, match=next(iter(wrong))):
        asyncio.run(last_of(engine, [5, 6], params))
    with pytest.raises(RequestError, match=next(iter(wrong))):
        llm.llm_engine.add_request("r", [5, 6], params)


@pytest.mark.parametrize("priority", [2**63, -(2**70), 1.5, True, "1", None])
def test_a_priority_is_an_integer_of_64_bits(engine, llm, priority):
    with pytest.raises(RequestError, match="priority=.* must be an int in"):
        asyncio.run(anext(engine.generate([5, 6], PARAMS, priority=priority)))
    with pytest.raises(RequestError, match="priority=.* must be an int in"):
        llm.llm_engine.add_request("r", [5, 6], PARAMS, priority=priority)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: anext(engine.generate({"prompt_token_ids": [5, 6], "cache_salt": HALF_A_PAIR}, PARAMS)),
        lambda engine: engine.collective_rpc("get_norms", args=[2**70]),
        lambda engine: engine.collective_rpc(HALF_A_PAIR),
        lambda engine: engine.sleep(level=2**70),
        lambda engine: engine.pause_generation(mode=HALF_A_PAIR),
        lambda engine: engine.wake_up([HALF_A_PAIR]),
        lambda engine: engine.update_weights(f"/tmp/{HALF_A_PAIR}"),
        lambda engine: engine.score([[5]], [[6]], temperature="x"),
    ],
    ids=["generate", "arguments", "method", "sleep", "pause", "wake", "path", "score"],
)
def test_what_cannot_be_sent_fails_alone(engine, last_of, call):
    async def run():
        beside = asyncio.create_task(last_of(engine, [5, 6, 7], PARAMS))
        with pytest.raises(RolloutEngineError):
            await call(engine)
        assert (await beside).outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_an_abort_of_what_was_never_sent_aborts_the_rest(engine, last_of, until_computing):
    async def run():
        endless = asyncio.create_task(last_of(engine, [5, 6], SamplingParams(max_tokens=30_000, ignore_eos=True), "r"))
        await until_computing(engine)
        await engine.abort([HALF_A_PAIR, "r"])
        return (await endless).outputs[0].finish_reason

    assert asyncio.run(run()) == "abort"


def test_extra_arguments_are_text_that_can_be_sent():
    with pytest.raises(RequestError, match="extra_args=.* must be plain data"):
        SamplingParams(extra_args={"a": HALF_A_PAIR})
