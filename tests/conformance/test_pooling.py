"""Requests that pool their prompts give the same bits over every client, beside other requests, and leave nothing."""

import asyncio

import numpy as np
import pytest

from rollout_engine import LLM, AsyncLLM, PoolingParams, RequestError, SamplingParams
from tests.conformance.running import SHORT, bring_back, ended, in_flight, last_of, plain, step_until, weights

PROMPT = list(range(5, 105))
KINDS = {
    "last": dict(kind="last", normalize=True),
    "mean": dict(kind="mean"),
    "first": dict(kind="cls"),
    "every token": dict(kind="token", normalize=True),
    "marked tokens": dict(kind="token", step_token_ids=[7, 50, 3]),
    "no marked token": dict(kind="token", step_token_ids=[200]),
    "truncated": dict(kind="mean", truncate_prompt_tokens=9),
    "truncated on the right": dict(kind="mean", truncate_prompt_tokens=9, truncation_side="right"),
}
SHAPES = {"every token": (100, 64), "marked tokens": (2, 64), "no marked token": (0, 64)}
REFUSED = {
    "no head": (PROMPT, dict(kind="classify"), r"kind='classify' .* no classification head \(no score.weight\)"),
    "too long": ([5] * 40_000, {}, "at most max_model_len=32768 tokens"),
    "empty": ([], {}, "It is empty"),
    "marks outside the vocabulary": (
        PROMPT,
        dict(kind="token", step_token_ids=[999]),
        "step_token_ids=999 .* vocabulary",
    ),
    "outside the vocabulary": ([5, 999], {}, r"prompt_token_ids\[1\]=999"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_pooling_gives_the_same(engine, same, name):
    output = last_of(engine, PROMPT, PoolingParams(**KINDS[name]))
    found = output.pooled
    assert (found.finish_reason, found.error, output.outputs[0].token_ids) == ("stop", None, [])
    assert found.data.dtype == np.float32 and found.data.shape == SHAPES.get(name, (64,))
    assert found.policy_version == found.kv_min_version == engine.policy_version
    same(plain(found.data))


def test_truncation_keeps_the_end_or_the_beginning(engine):
    def pooled(prompt, **params):
        return plain(last_of(engine, prompt, PoolingParams(kind="mean", **params)).pooled.data)

    cut = {side: pooled(PROMPT, truncate_prompt_tokens=9, truncation_side=side) for side in ("left", "right")}
    assert cut == {"left": pooled(PROMPT[-9:]), "right": pooled(PROMPT[:9])}


def test_a_prompt_beside_others_is_pooled_as_alone(engine):
    alone = plain(last_of(engine, PROMPT, PoolingParams(kind="mean")).pooled.data)
    with in_flight(engine):
        ids = engine.add_requests([PROMPT, PROMPT[:3], PROMPT], [PoolingParams(kind="mean"), SHORT, {"max_tokens": 2}])
        outputs = step_until(engine, lambda: not any(map(engine.is_unfinished, ids)))
        first = next(output for output in outputs if output.request_id == ids[0])
    assert plain(first.pooled.data) == alone


def test_encode_keeps_the_order_and_takes_one_params_or_one_each(engine, same):
    llm = LLM.from_engine(engine)
    texts = ["hello", "a longer text than that", "hi"]
    found = llm.encode(texts, {"kind": "mean"}, use_tqdm=False)
    each = llm.encode(texts, [PoolingParams(kind=kind) for kind in ("mean", "token", "cls")], use_tqdm=False)
    assert [output.prompt for output in found] == texts and all(output.finished for output in found)
    assert plain(found[0].outputs.data) == plain(each[0].outputs.data)
    assert each[1].outputs.data.shape == (len(each[1].prompt_token_ids), 64)
    same([plain(output.outputs.data) for output in [*found, *each]])


def test_a_conversation_is_pooled_without_the_header_of_a_next_message(engine, same):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    llm = LLM.from_engine(engine)
    closed, opened = (llm.encode([said], use_tqdm=False, **more)[0] for more in ({}, {"add_generation_prompt": True}))
    assert closed.prompt.endswith("ho<eos>") and opened.prompt == closed.prompt + "<|assistant|>"
    same(plain(closed.outputs.data))


def test_the_asynchronous_face_yields_one_output(engine):
    if engine.frontend.client.needs_turns:
        pytest.skip("an asynchronous face needs an engine that computes by itself")

    expected = last_of(engine, PROMPT, PoolingParams(kind="mean")).pooled.data
    face = AsyncLLM._standing_on(engine.frontend)

    async def encode():
        return [output async for output in face.encode(PROMPT, {"kind": "mean"})]

    (output,) = asyncio.run(encode())
    assert output.finished and plain(output.outputs.data) == plain(expected)


@pytest.mark.parametrize("prompt, params, match", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_pooled_is_refused_in_the_same_words(engine, same, prompt, params, match):
    llm = LLM.from_engine(engine)
    with pytest.raises(RequestError, match=match) as caught:
        llm.encode([[5], prompt], [{}, params], use_tqdm=False)
    assert "prompts[1]" in str(caught.value)
    same(str(caught.value))
    assert len(engine.frontend.streams) == engine.check_health().num_unfinished_requests == 0


def test_params_of_the_other_kind_of_request_are_refused(engine):
    llm = LLM.from_engine(engine)
    with pytest.raises(RequestError, match="SamplingParams go to generate"):
        llm.encode(["a"], SamplingParams(), use_tqdm=False)
    with pytest.raises(RequestError, match=r"prompts\[1\]: pooling_params=SamplingParams.*go to generate"):
        llm.encode(["a", "b"], [PoolingParams(), SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="PoolingParams go to encode"):
        llm.generate(["a"], PoolingParams(), use_tqdm=False)


def test_a_result_tells_the_weights_that_made_it(engine):
    before = last_of(engine, PROMPT, PoolingParams()).pooled
    engine.update_weights(weights(1))
    after = last_of(engine, PROMPT, PoolingParams()).pooled
    assert after.policy_version == after.kv_min_version == before.policy_version + 1
    assert not np.array_equal(before.data, after.data)
    engine.update_weights(weights(0))
    assert np.array_equal(last_of(engine, PROMPT, PoolingParams()).pooled.data, before.data)


def test_a_pooling_request_waits_for_a_pause_and_can_be_aborted(engine):
    engine.pause_generation()
    engine.add_request("in flight", PROMPT, PoolingParams(kind="mean"))
    engine.add_request("aborted", PROMPT, PoolingParams(kind="mean"))
    engine.abort_request("aborted")
    outputs = step_until(engine, lambda: not engine.is_unfinished("aborted"))
    (found,) = [output.pooled for output in outputs if output.request_id == "aborted"]
    assert (found.finish_reason, found.data) == ("abort", None)
    assert engine.is_unfinished("in flight")
    engine.resume_generation()
    assert ended(engine).finish_reason == "stop"
    bring_back(engine)
