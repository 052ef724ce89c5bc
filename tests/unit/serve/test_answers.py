"""The reading of answers, whole and as they arrive."""

import pytest

from rollout_engine.serve.chat.answers import AnswerReader, join_pieces
from rollout_engine.serve.chat.sealed import seal, unseal
from rollout_engine.serve.chat.tools import RequestTools

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
    reader = AnswerReader(served, None, None, splits_thinking=True)
    prompt_ids, token_ids = (served.codec.encode(each, add_special_tokens=False) for each in (prompt, text))
    whole = reader.read(prompt_ids, token_ids, text)
    assert (whole.thinking, whole.text) == (thinking, words)
    for size in (1, 2, 3, 5):
        stream, pieces = reader.stream(prompt_ids), []
        for start in range(0, len(text), size):
            pieces += stream.feed(token_ids[start : start + size], text[start : start + size])
        parts = join_pieces([*pieces, *stream.end()])
        assert (parts.thinking, parts.text) == (thinking, words)


def test_calls_are_found_behind_thinking_and_not_in_it(client):
    served, text = client.app.served, f"<think>{CALL}</think>I add. {CALL}"
    tools = RequestTools.of(served, [ADD], None, TEMPLATE)
    reader = AnswerReader(served, tools, TEMPLATE, splits_thinking=True)
    token_ids = served.codec.encode(text, add_special_tokens=False)
    parts = reader.read([5], token_ids, text)
    assert (parts.thinking, parts.text, [call.arguments for call in parts.calls]) == (CALL, "I add.", [{"a": 1}])
    assert reader.count_thinking(token_ids, parts) == len(f"<think>{CALL}</think>")


def test_what_was_sealed_comes_back_and_nothing_else_does():
    assert unseal(seal("héllo\n")) == "héllo\n"
    assert unseal("") is None and unseal("zz") is None and unseal("héé") is None and unseal("aGVsbG8=") is None
