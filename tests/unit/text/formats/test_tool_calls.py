"""Tool calls are found in their common forms; what is broken is told, and nothing raises."""

import json
import random

import pytest

from rollout_engine.text.formats.tool_calls import (
    BrokenCall,
    ToolCall,
    format_of_template,
    opens_thinking,
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
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>"
)
ADDED = {"a": "1", "b": "x y"}


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
        ("llama3", '{"name": "Bob", "age": 3}', []),
        ("llama3", '<|python_tag|>{"name": "now"}', [ToolCall("now", {})]),
        ("llama3", "The set {1, 2} is finite.", []),
        ("xml", XML, [ToolCall("add", {"a": "1", "b": "x\ny"})]),
        ("xml", "<tool_call><function=now></function></tool_call>", [ToolCall("now", {})]),
        ("seed", XML.replace("tool_call", "seed:tool_call"), [ToolCall("add", {"a": "1", "b": "x\ny"})]),
        ("glm", GLM, [ToolCall("add", {"a": "1", "b": "x y"})]),
        ("glm", GLM.replace("\n", "") + "<tool_call>now</tool_call>", [ToolCall("add", ADDED), ToolCall("now", {})]),
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
        ("hermes", HERMES.replace("</tool_call>", "Done."), "something other than </tool_call> follows it"),
        ("llama3", '{"name": "f", "parameters": {', "not JSON"),
        ("llama3", '{"name": 3, "parameters": {}}', "it names no tool"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "not NAME<arg_key>"),
        ("llama3", "<|python_tag|>print(1)", "not JSON"),
        ("xml", "<tool_call>add(1)</tool_call>", "not <function=NAME>"),
        ("xml", "<tool_call><function=f>1</function></tool_call>", "something other than <parameter=NAME>"),
    ],
)
def test_broken_calls_stay_text_and_are_told(form, text, problem):
    found = parse_tool_calls(text, form)
    [broken] = found.broken
    assert isinstance(broken, BrokenCall) and problem in broken.problem and not found.calls


def test_calls_and_broken_ones_stand_in_their_order():
    parsed = parse_tool_calls(f"{HERMES}<tool_call>?</tool_call>{HERMES}", "hermes")
    assert [type(each) for each in parsed.found] == [ToolCall, BrokenCall, ToolCall]
    assert parsed.calls == [ADD, ADD] and [each.text for each in parsed.broken] == ["?"]
    assert parsed.texts == [HERMES, "<tool_call>?</tool_call>", HERMES]


CALLS = {"hermes": HERMES, "xml": XML, "seed": XML.replace("tool_call", "seed:tool_call"), "glm": GLM, "llama3": LLAMA3}


@pytest.mark.parametrize("form", CALLS)
def test_calls_drafted_in_thinking_are_no_calls(form):
    call = CALLS[form]
    draft = call.replace("add", "delete")
    for text in (
        f"<think>\nI could {draft} but no.\n</think>\n\n{call}",
        f"{draft} would be wrong.\n</think>\n\n{call}",
        f"<think>\nI write <tool_call>, <seed:tool_call> and JSON.\n</think>\n\n{call}",
    ):
        parsed = parse_tool_calls(text, form)
        assert [each.name for each in parsed.found] == ["add"]
    assert not parse_tool_calls(f"<think>\nI could {draft}", form).found
    assert not parse_tool_calls(f"<think>\n{draft}\n</think>\n\nNothing to do.", form).found
    assert not parse_tool_calls(draft, form, is_thinking=True).found
    assert parse_tool_calls(f"{draft}</think>{call}", form, is_thinking=True).texts == [call]
    assert parse_tool_calls(f"{call}</think>", form, is_thinking=False).texts == [call]
    assert parse_tool_calls(f"<think>{draft}</think>{call}</think>", form).texts == [call]
    assert parse_tool_calls(f"{draft}</think>{call}</think>", form, is_thinking=True).texts == [call]


@pytest.mark.parametrize(
    "prompt_end, is_thinking",
    [("assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", None), ("say <think>\nassistant: ", None)],
)
def test_a_prompt_may_open_the_thinking(prompt_end, is_thinking):
    assert opens_thinking(prompt_end) is is_thinking


@pytest.mark.parametrize("form", ["hermes", "xml", "seed", "glm"])
def test_prose_that_names_the_tag_swallows_no_call(form):
    tag = CALLS[form].partition(">")[0] + ">"
    assert [each.name for each in parse_tool_calls(f"I write {tag} around: {CALLS[form]}", form).found] == ["add"]
    assert not parse_tool_calls(f"Shall I write {tag} around it?", form).found


@pytest.mark.parametrize("form", CALLS)
def test_arguments_may_contain_the_tags(form):
    value = "a </tool_call> <tool_call> </seed:tool_call> </parameter> <think> </arg_value> </think> b"
    call = CALLS[form].replace('"x"', json.dumps(value)).replace("x\ny", value).replace("x y", value)
    [found] = parse_tool_calls(call, form).found
    assert value in (found.arguments["b"], found.arguments["b"][1])


def test_thinking_within_a_broken_call_hides_no_call():
    broken = HERMES.replace('"x"', '"<think>" "x"')
    assert [type(each) for each in parse_tool_calls(broken + HERMES, "hermes").found] == [BrokenCall, ToolCall]


@pytest.mark.parametrize("end", ["<|eom_id|>", "<|eot_id|>", "<|im_end|>\n", "</s>", "<eos>"])
@pytest.mark.parametrize("form, call", [("llama3", "<|python_tag|>" + LLAMA3), ("hermes", HERMES[:-12])])
def test_an_end_token_is_no_part_of_a_call(form, call, end):
    assert parse_tool_calls(call + end, form).found == [ADD]


@pytest.mark.parametrize(
    "value, problem", [("NaN", "NaN"), ("-Infinity", "-Infinity"), ("1e999", "1e999"), ("[" * 70 + "]" * 70, "64")]
)
def test_what_json_cannot_hold_is_broken(value, problem):
    for form, call in (("hermes", HERMES), ("llama3", LLAMA3)):
        [broken] = parse_tool_calls(call.replace('"x"', value), form).broken
        assert problem in broken.problem


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    [call] = parse_tool_calls(
        HERMES.replace("add", r"add\ud800").replace('"x"', r'"\ud83d\ude00 \udc00"'), "hermes"
    ).calls
    assert call == ToolCall("add\ufffd", {"a": 1, "b": [2, "\U0001f600 \ufffd"]})


def test_a_parameter_that_is_not_closed_is_no_part_of_the_one_before():
    text = XML.replace("1\n</parameter>\n", "1\n")
    assert "is not closed" in parse_tool_calls(text, "xml").broken[0].problem
    assert parse_tool_calls(GLM.replace("1</arg_value>\n", "1"), "glm").broken


def test_there_is_an_end_of_calls():
    found = parse_tool_calls(HERMES * 100, "hermes")
    assert len(found.calls) == 64 and "more than 64 calls" in found.broken[0].problem


@pytest.mark.parametrize("form", ["hermes", "llama3", "xml", "seed", "glm"])
def test_no_text_raises(form):
    pieces = [
        HERMES,
        LLAMA3,
        XML,
        GLM,
        "<think>",
        "</think>",
        "<seed:tool_call>",
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


PAIR = {"type": "object", "properties": {"x": {"type": "integer"}}}
PROPERTIES = {
    "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "nullable": {"type": "integer", "nullable": True},
    "types": {"type": ["integer", "null"]},
    "union": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "pair": {"$ref": "#/$defs/Pair"},
    "all": {"allOf": [{"$ref": "#/$defs/Pair"}], "description": "a pair"},
    "maybe": {"anyOf": [{"$ref": "#/$defs/Pair"}, {"type": "null"}]},
    "level": {"enum": [1, 2]},
    "colour": {"$ref": "#/$defs/Colour"},
    "const": {"const": 5},
    "flag": {"type": "boolean"},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "string": {"type": "string"},
    "any": {},
    "loop": {"$ref": "#/$defs/Loop"},
    "lost": {"$ref": "#/$defs/Lost"},
}
DEFS = {"Pair": PAIR, "Colour": {"enum": ["red", "blue"]}, "Loop": {"$ref": "#/$defs/Loop"}}
TYPED = [
    *[(name, text, value) for name in ("optional", "nullable", "types") for text, value in (("5", 5), ("null", None))],
    *[("optional", "None", None), ("optional", "many", "many"), ("optional", "true", "true")],
    *[("union", "5", 5), ("union", "five", "five"), ("text", "null", None), ("text", "5", "5")],
    *[(name, '{"x": 1}', {"x": 1}) for name in ("pair", "all", "maybe")],
    *[("pair", "x", "x"), ("maybe", "None", None), ("pair", "{'x': None}", {"x": None}), ("pair", "{1: 2}", "{1: 2}")],
    *[("pair", "{'x': open('a')}", "{'x': open('a')}"), ("pair", "{'x': 1e999}", "{'x': 1e999}")],
    *[("level", "2", 2), ("level", "3", "3"), ("colour", "red", "red"), ("colour", '"red"', "red"), ("const", "5", 5)],
    *[("flag", "True", True), ("flag", "false", False), ("flag", "1", "1"), ("number", "true", "true")],
    *[("number", "5", 5), ("number", "5.5", 5.5), ("number", "NaN", "NaN"), ("number", "1e999", "1e999")],
    *[("integer", "5.0", 5), ("integer", "5.5", "5.5"), ("integer", " 5\n", 5)],
    *[("string", "5", "5"), ("string", '"5"', '"5"'), ("string", "null", "null"), ("any", "5", "5")],
    *[("loop", "[1]", [1]), ("lost", "a", "a"), ("unknown", "5", "5")],
]


@pytest.mark.parametrize("name, text, value", TYPED)
def test_the_schema_says_what_a_text_spells(name, text, value):
    schema = {"type": "object", "$defs": DEFS, "properties": PROPERTIES}
    for each in (schema, {"$defs": DEFS | {"All": schema}, "$ref": "#/$defs/All"}):
        typed = with_types(ToolCall("f", {name: text}), each).arguments[name]
        assert (typed, type(typed)) == (value, type(value))


@pytest.mark.parametrize(
    "template, form",
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>' }}", "glm"),
        ("{{ '<seed:tool_call><function=NAME></function></seed:tool_call>' }}", "seed"),
        ('{{ \'{"name": function name, "parameters": dictionary of argument name and its value}\' }}', "llama3"),
        ("{{ tool['parameters'] }} \"parameters\"", None),
        ("{{ '<tool_call><function=' }}", "xml"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ m }}", None),
    ],
)
def test_a_template_tells_its_form(template, form):
    assert format_of_template(template) == form


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}] * 50}}},
        {"allOf": [{"$ref": "#"}] * 50},
    ],
)
def test_a_schema_whose_references_multiply_leaves_texts(schema):
    assert with_types(ToolCall("f", {"a": "1"}), schema) == ToolCall("f", {"a": "1"})
