"""Tool calls are found in their common forms; what is broken is told, and nothing raises."""

import json
import random

import pytest

from rollout_engine.episodes.tool_calls import (
    BrokenCall,
    ToolCall,
    format_of_template,
    parse_tool_calls,
    with_types,
)

ADD = ToolCall("add", {"a": 1, "b": [2, "x"]})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
LLAMA3 = '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    "form, text, calls",
    [
        ("hermes", HERMES, [ADD]),
        ("hermes", f"Let me see. {HERMES}\n{HERMES} Done.", [ADD, ADD]),
        ("hermes", HERMES.removesuffix("</tool_call>"), [ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("f", {"a": 1})]),
        ("hermes", LLAMA3, []),
        ("hermes", "", []),
        ("llama3", LLAMA3, [ADD]),
        ("llama3", f" <|python_tag|>{LLAMA3}; {LLAMA3}", [ADD, ADD]),
        ("llama3", '{"answer": 42}', []),
        ("llama3", "The set {1, 2} is finite.", []),
        ("xml", XML, [ToolCall("add", {"a": "1", "b": "x\ny"})]),
        ("xml", "<tool_call><function=now></function></tool_call>", [ToolCall("now", {})]),
    ],
)
def test_calls_are_found(form, text, calls):
    found = parse_tool_calls(text, form)
    assert (found.calls, found.broken) == (calls, [])


@pytest.mark.parametrize(
    "form, text, problem",
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "a JSON list, not an object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "it names no tool"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments are a list"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "arguments are a text"),
        ("hermes", "<tool_call>" + "[" * 60_000, "not JSON"),
        ("hermes", "<tool_call>{" + "x" * 69_999, "70000 characters, more than 65536"),
        ("llama3", '{"name": "f", "parameters": {', "not JSON"),
        ("llama3", "<|python_tag|>print(1)", "not JSON"),
        ("xml", "<tool_call>add(1)</tool_call>", "not <function=NAME>"),
        ("xml", "<tool_call><function=f>1</function></tool_call>", "something other than <parameter=NAME>"),
    ],
)
def test_broken_calls_stay_text_and_are_told(form, text, problem):
    found = parse_tool_calls(text, form)
    [broken] = found.broken
    assert isinstance(broken, BrokenCall) and problem in broken.problem and not found.calls


def test_calls_beside_broken_ones_count():
    found = parse_tool_calls(f"{HERMES}<tool_call>?</tool_call>{HERMES}", "hermes")
    assert found.calls == [ADD, ADD] and [each.text for each in found.broken] == ["?"]


def test_there_is_an_end_of_calls():
    found = parse_tool_calls(HERMES * 100, "hermes")
    assert len(found.calls) == 64 and "more than 64 calls" in found.broken[0].problem


@pytest.mark.parametrize("form", ["hermes", "llama3", "xml"])
def test_no_text_raises(form):
    pieces = [
        HERMES,
        LLAMA3,
        XML,
        "<tool_call>",
        "</function>",
        "<parameter=",
        "<|python_tag|>",
        '{"name"',
        "\ud800",
        "\0",
    ]
    drawn = random.Random(0)
    for _ in range(2000):
        text = "".join(drawn.choice(pieces) for _ in range(drawn.randrange(6)))
        cut = drawn.randrange(len(text) + 1)
        found = parse_tool_calls(text[:cut] + drawn.choice(["", "}", "<", "\\u12"]) + text[cut:], form)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in found.calls)


def test_texts_get_the_types_of_the_schema():
    schema = {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {"type": "array"},
            "d": {"type": "number"},
        }
    }
    call = ToolCall("f", {"a": "1", "b": "2", "c": json.dumps([1]), "d": "many", "e": "3"})
    assert with_types(call, schema).arguments == {"a": 1, "b": "2", "c": [1], "d": "many", "e": "3"}


@pytest.mark.parametrize(
    "template, form",
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call><function=' }}", "xml"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ m }}", None),
    ],
)
def test_a_template_tells_its_form(template, form):
    assert format_of_template(template) == form
