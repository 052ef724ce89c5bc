"""Structured outputs under every name that clients give them."""

import json

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
COMPACT = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
TAG = {"structures": [{"begin": "(f ", "schema": {"type": "null"}, "end": ")"}], "triggers": ["(f"]}
EBNF = 'root ::= "x" digit+\ndigit ::= [0-3]'


def is_object(text):
    return set(json.loads(text)) == {"a"}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "fields, holds",
    [
        ({"structured_outputs": {"json": COMPACT}}, is_object),
        ({"structured_outputs": {"json": COMPACT, "regex": None, "disable_fallback": False}}, is_object),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": COMPACT}}}, is_object),
        ({"guided_json": json.dumps(COMPACT)}, is_object),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"guided_grammar": EBNF}, lambda text: text[0] == "x" and text[1:].isdigit()),
        ({"json_schema": json.dumps(COMPACT)}, is_object),
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"ebnf": EBNF}, lambda text: text[0] == "x" and text[1:].isdigit()),
    ],
)
def test_clients_of_openais_routes_bind_an_output(client, fields, holds):
    body = {"prompt": "a", "max_tokens": 100, "seed": 3, "temperature": 0.7, **fields}
    [choice] = client.post("/v1/completions", body)["choices"]
    assert choice["finish_reason"] == "stop" and holds(choice["text"])
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "seed": 4, "temperature": 0.7, **fields}
    [choice] = client.post("/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "stop" and holds(choice["message"]["content"])


@pytest.mark.parametrize(
    "fields, holds",
    [
        ({"json_schema": json.dumps(COMPACT)}, is_object),
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"ebnf": EBNF}, lambda text: text[0] == "x" and text[1:].isdigit()),
    ],
)
def test_sglang_clients_bind_an_output(client, fields, holds):
    settings = {"max_new_tokens": 100, "sampling_seed": 5, "temperature": 0.7, **fields}
    answer = client.post("/generate", {"text": "a", "sampling_params": settings})
    assert answer["meta_info"]["finish_reason"]["type"] == "stop" and holds(answer["text"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "structural_tag", **TAG}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_forms_that_leave_the_text_free_or_ask_for_any_object_are_taken(client, fields):
    [choice] = client.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "seed": 1, **fields})["choices"]
    is_object = fields.get("response_format") == {"type": "json_object"}
    assert choice["finish_reason"] in ("stop", "length") and (not is_object or choice["text"].lstrip()[:1] == "{")


PAIR = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": "   "}}
TAGGED = {
    "structures": [{"begin": "<f>", "schema": PAIR, "end": "</f>"}],
    "triggers": ["<f>"],
    "stop_after_first": True,
}


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PAIR}}},
        {"structured_outputs": {"json": PAIR, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": PAIR, "disable_any_whitespace": False}},
        {"guided_json": json.dumps(PAIR)},
        {"json_schema": PAIR},
        {"structured_outputs": {"structural_tag": TAGGED | {"at_least_one": True}}},
    ],
)
def test_json_is_compact(client, fields):
    for seed in range(4):
        body = {"prompt": "a", "max_tokens": 40, "seed": seed, "temperature": 1.5, **fields}
        [choice] = client.post("/v1/completions", body)["choices"]
        assert choice["finish_reason"] == "stop" and " " not in choice["text"] and "," in choice["text"]


def test_a_schema_may_ask_for_white_space(client):
    body = {"prompt": "a", "max_tokens": 40, "seed": 1, "guided_json": PAIR | SPACED}
    assert "   " in client.post("/v1/completions", body)["choices"][0]["text"]
