"""Messages with channels: what counts as a header, a body and a call."""

import random

import pytest

from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.answer import AnswerParts
from rollout_engine.text.formats.choose import answer_format

from .answers import ADD, ARGUMENTS, FINAL, TO_ADD, TOOLS, codec_with, read_in_pieces, shown, tags_of

CODEC = codec_with(tags_of("harmony"), special=True)
FORM = answer_format(CODEC, None, "harmony")
PROMPT = "<|start|>user<|message|>Hi.<|end|><|start|>assistant"


def read(answer, prompt=PROMPT, tools=TOOLS):
    """The parts of an answer, which are the same in pieces."""
    token_ids, ids_of_prompt = (CODEC.encode(each, add_special_tokens=False) for each in (answer, prompt))
    text, rng = shown(CODEC, token_ids), random.Random(answer)
    parts = FORM.read(token_ids, text, prompt_end=ids_of_prompt, tools=tools)
    assert FORM.read(token_ids, text, prompt_end=prompt, tools=tools) == parts
    for _ in range(10):
        assert read_in_pieces(FORM, token_ids, text, rng, prompt_end=ids_of_prompt, tools=tools) == parts
    return parts


@pytest.mark.parametrize(
    "answer, parts",
    [
        ("", AnswerParts()),
        ("Hello.", AnswerParts(text="Hello.")),
        ("<|channel|>analysis", AnswerParts()),
        ("<|channel|>analysis<|message|>", AnswerParts("", is_thinking=True)),
        ("<|channel|>analysis<|message|>hm", AnswerParts("hm", is_thinking=True)),
        ("<|channel|>analysis<|message|> \n<|end|>" + FINAL, AnswerParts("", "Done.")),
        (FINAL.removeprefix("<|start|>assistant"), AnswerParts(text="Done.")),
        (FINAL.replace("Done.", ' I write to=functions.add and "analysis". '), None),
        ("<|channel|>commentary<|message|>I add.<|end|>" + TO_ADD, AnswerParts(text="I add.", found=[ADD])),
        (f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", AnswerParts(found=[ADD])),
        ("<|channel|>analysis to=search<|message|>{}<|call|>", AnswerParts(found=[ToolCall("search", {})])),
        (TO_ADD.replace(ARGUMENTS, ""), AnswerParts(found=[ToolCall("add", {})])),
        ("<|channel|>analysis<|message|>a<|end|>" * 2 + FINAL, AnswerParts("a\na", "Done.")),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", AnswerParts("a", "b")),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|start|>" + FINAL, AnswerParts("a", "Done.")),
        (TO_ADD.removesuffix("<|call|>"), AnswerParts(found=[ADD])),
    ],
)
def test_an_answer_in_messages(answer, parts):
    found = read(answer)
    if parts is None:
        parts = AnswerParts(text='I write to=functions.add and "analysis".')
    assert found == parts


@pytest.mark.parametrize(
    "body, problem",
    [
        ("print(1)", "not JSON"),
        ("[1]", "its arguments are a list, not an object"),
        ('{"a": 1', "not JSON"),
        ('{"a": NaN}', "NaN"),
        ("[" * 10_000, "not JSON"),
        ('{"a": "' + "x" * 70_000 + '"}', "70009 characters, more than 65536"),
    ],
)
def test_a_call_that_cannot_be_read_stays_text(body, problem):
    parts = read(TO_ADD.replace(ARGUMENTS, body)) if len(body) < 20_000 else None
    if parts is None:
        token_ids = CODEC.encode(TO_ADD.replace(ARGUMENTS, body), add_special_tokens=False)
        parts = FORM.read(token_ids, shown(CODEC, token_ids), prompt_end=PROMPT, tools=TOOLS)
    [broken] = parts.found
    assert isinstance(broken, BrokenCall) and problem in broken.problem and parts.text == body and not parts.calls


def test_calls_beyond_the_bound_stay_text():
    parts = read(TO_ADD * 70)
    assert len(parts.calls) == 64 and len(parts.broken) == 1 and "more than 64 calls" in parts.broken[0].problem


def test_a_prompt_may_have_written_the_header():
    assert read("Done.", PROMPT + "<|channel|>final<|message|>") == AnswerParts(text="Done.")
    assert read("hm<|end|>" + FINAL, PROMPT + "<|channel|>analysis<|message|>") == AnswerParts("hm", "Done.")
    assert read(f"<|message|>{ARGUMENTS}", PROMPT + " to=functions.add<|channel|>commentary") == AnswerParts(
        found=[ADD]
    )


def test_without_tools_a_call_is_text():
    assert read(TO_ADD, tools=None) == AnswerParts(text=ARGUMENTS)
