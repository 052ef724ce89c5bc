"""The reading of answers, whole and as they arrive; and whole samples of their parts."""

import asyncio

import numpy as np
import pytest

from rollout_engine import SamplingParams
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.serve.chat.answer_parts import AnswerParts, join_pieces
from rollout_engine.serve.chat.answers import AnswerReader
from rollout_engine.serve.chat.joined_samples import join_output
from rollout_engine.serve.chat.sealed import seal, unseal
from rollout_engine.serve.chat.tools import ToolParser

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }} by <tool_call>{% endfor %}"


@pytest.mark.parametrize(
    "prompt, text, thinking, words",
    [
        ("<assistant><think>\n", "\nhm\n ok\n\n</think>\n\nFive</think>", "hm\n ok", "Five</think>"),
        ("<assistant>", "<think>\n\n</think>\n\nhello", "", "hello"),
        ("<assistant>", "\n<think>abc</thi</think>\nx", "abc</thi", "x"),
        ("<assistant>", "<thin no", None, "<thin no"),
        ("<assistant>", "  <think>un\n", "un", ""),
        ("<assistant>", "", None, ""),
        ("<assistant>", "hello\n\nthere ", None, "hello\n\nthere "),
    ],
)
def test_thinking_is_apart_whether_whole_or_streamed(client, prompt, text, thinking, words):
    served = client.app.served
    reader = AnswerReader(served, None, splits_thinking=True)
    prompt_ids, token_ids = (served.codec.encode(each, add_special_tokens=False) for each in (prompt, text))
    assert reader.read(prompt_ids, token_ids, text) == AnswerParts(thinking, words, [])
    for size in (1, 2, 3, 5):
        stream, pieces = reader.stream(prompt_ids), []
        for start in range(0, len(text), size):
            pieces += stream.feed(token_ids[start : start + size], text[start : start + size])
        assert join_pieces([*pieces, *stream.end()]) == AnswerParts(thinking, words, [])


def test_calls_are_found_behind_thinking_and_not_in_it(client):
    served, text = client.app.served, f"<think>{CALL}</think>I add. {CALL}"
    parser = ToolParser.of(served, [ADD], None, TEMPLATE)
    reader = AnswerReader(served, parser, splits_thinking=True)
    token_ids = served.codec.encode(text, add_special_tokens=False)
    parts = reader.read([5], token_ids, text)
    assert (parts.thinking, parts.text, [call.arguments for call in parts.calls]) == (CALL, "I add.", [{"a": 1}])
    assert reader.count_thinking(token_ids) == len(f"<think>{CALL}</think>")


def test_parts_of_a_stream_are_the_whole_sample(policy):
    asked = {"max_tokens": 6, "logprobs": 2, "seed": 1, "n": 2, "top_k": 5, "entropy": True, "return_support": True}
    whole = run(policy, SamplingParams(**asked, logprobs_mode="processed", output_kind="final_only"))[-1]
    outputs = run(policy, SamplingParams(**asked, logprobs_mode="processed", output_kind="delta"))
    samples = {}
    for output in outputs:
        for sample in output.outputs:
            samples.setdefault(sample.index, []).append(sample)
    assert len(outputs) > 2
    joined = join_output(outputs[-1], samples)
    for one, other in zip(joined.outputs, whole.outputs, strict=True):
        for field in one.__struct_fields__:
            assert_same(getattr(one, field), getattr(other, field), field)


def assert_same(one, other, field):
    if isinstance(one, tuple):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right, err_msg=field)
            assert left.dtype == right.dtype
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, err_msg=field)
        assert one.dtype == other.dtype
    else:
        assert one == other, field


def run(policy, params):
    """All outputs of one request."""

    async def ask():
        return [output async for output in AsyncLLM.from_engine(policy).generate([5, 6, 7], params)]

    return asyncio.run(ask())


def test_what_was_sealed_comes_back_and_nothing_else_does():
    assert unseal(seal("héllo\n")) == "héllo\n"
    assert unseal("") is None and unseal("zz") is None and unseal("héé") is None and unseal("aGVsbG8=") is None
