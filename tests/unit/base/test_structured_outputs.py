"""Which structured outputs are let through to the compiler of grammars."""

import math

import pytest

from rollout_engine import RequestError, SamplingParams
from rollout_engine.base.structured_outputs import MAX_GRAMMAR_CHARS


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


TAG = {"begin": "<a>", "schema": {}, "end": ""}


@pytest.mark.parametrize(
    "given, names",
    [
        ({}, "'json', 'regex', 'grammar', 'choice', 'structural_tag'"),
        ({"json": {}, "regex": "a"}, "a dict with exactly one of"),
        ({"jsn": {}}, "Did you mean 'json'?"),
        ({"json": {"const": "a" * 80}, "disable_any_whitespace": True}, "'disable_any_whitespace' is none of them."),
        ({"type": "object", "properties": {}}, "Give a JSON schema as {'json': schema}."),
        ({"json": 3}, "structured_outputs['json']=3"),
        ({"json": "{"}, "JSON text"),
        ({"json": nested(64)}, "at most 64 dicts and lists"),
        ({"json": "[" * 60_000}, "JSON text"),
        ({"json": {"const": "a" * MAX_GRAMMAR_CHARS}}, f"at most {MAX_GRAMMAR_CHARS} characters"),
        ({"json": {"const": b"a"}}, "plain JSON"),
        ({"json": {"const": math.nan}}, "numbers finite"),
        ({"json": '{"maximum": Infinity}'}, "numbers finite"),
        ({"json": {"const": 10**5000}}, "numbers finite"),
        ({"json": nested(100_000)}, "at most 64 dicts and lists"),
        ({"regex": nested(100_000)}, "at least one character"),
        ({"json": {"const": "\ud800"}}, "half a surrogate pair"),
        ({"choice": ["\udfff"]}, "structured_outputs['choice'][0]"),
        ({"regex": ""}, "at least one character"),
        ({"regex": 3}, "structured_outputs['regex']=3"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most"),
        ({"choice": []}, "1 to 1024 strings"),
        ({"choice": ["a", ""]}, "structured_outputs['choice'][1]"),
        ({"structural_tag": {"structures": [TAG]}}, "triggers"),
        ({"structural_tag": {"structures": [TAG | {"more": 1}], "triggers": ["<a"]}}, "['structures'][0]"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["<a"], "at_least_one": 1}}, "['at_least_one']=1"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["<b"]}}, "text that begins with one of ['<b']"),
    ],
)
def test_what_is_no_structured_output_is_refused_by_name(given, names):
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=given)
    assert names in str(caught.value)


def test_what_is_one_is_kept_as_given():
    for given in ({"json": {"b": 1, "a": [2.5, -(10**300)]}}, {"json": True}, {"json": "{}"}, {"choice": ["x"]}):
        assert SamplingParams(structured_outputs=given).structured_outputs == given
    tags = {"type": "structural_tag", "structures": [TAG], "triggers": ["<", "<a"]}
    SamplingParams(structured_outputs={"structural_tag": tags})


def test_an_output_that_must_not_end_cannot_have_a_form():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True, stop_token_ids=[7])
