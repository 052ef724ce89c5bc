"""How the fields of a body that are missing, or of another type, are told."""

import msgspec
import pytest

from rollout_engine.serve import bodies
from rollout_engine.serve.bodies import OpenBytes, read_fields
from rollout_engine.serve.problems import HttpProblem


class Tool(msgspec.Struct):
    name: str


class Body(msgspec.Struct):
    prompt: str | list[int]
    tools: list[Tool] = []
    size: float | None = None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "/route: prompt is missing."),
        ({"prompt": "", "tools": [{}]}, "/route: tools[0].name is missing."),
        ({"prompt": 3}, "/route: prompt=3 is not allowed: must be a string or an array."),
        ({"prompt": [1, "a"]}, "/route: prompt[1] is not allowed: must be an integer, not a string."),
        ({"prompt": "", "size": "1"}, "/route: size='1' is not allowed: must be a number or null."),
        ({"prompt": "", "tools": {"name": "a"}}, "/route: tools={'name': 'a'} is not allowed: must be an array."),
        (
            {"prompt": "", "tools": [{"name": None}]},
            "/route: tools[0].name is not allowed: must be a string, not null.",
        ),
        ({"promt": ""}, "/route: Unknown field 'promt'. Did you mean 'prompt'?"),
    ],
)
def test_a_field_is_told_in_words_of_json(fields, told):
    with pytest.raises(HttpProblem) as refusal:
        read_fields(Body, fields, "/route")
    assert (refusal.value.status, str(refusal.value)[: len(told)]) == (400, told)


@pytest.mark.parametrize("value", [b"[],", b"{},", b'[["\\\\"]],', b'["]\\"", []],'])
def test_a_body_with_too_many_arrays_is_refused_before_any_is_made(client, monkeypatch, value):
    monkeypatch.setattr(bodies, "_MOST_VALUES", 50)
    monkeypatch.setattr(bodies, "_object", None)  # decodes it
    problem = client.problem("/v1/completions", content=b'{"prompt": [' + value * 60 + b"1]}")
    assert "arrays and objects, and may have 50" in problem["message"]


def test_a_body_with_too_many_numbers_is_refused_before_any_is_made(client, monkeypatch):
    monkeypatch.setattr(bodies, "_MOST_COMMAS", 50)
    monkeypatch.setattr(bodies, "_object", None)  # decodes it
    assert "60 commas" in client.problem("/v1/completions", {"prompt": [5] * 61})["message"]
    assert client.post("/tokenize", {"prompt": "," * 60})["count"] == 60


def test_brackets_within_texts_are_no_arrays(client, monkeypatch):
    monkeypatch.setattr(bodies, "_MOST_VALUES", 50)
    text = '[{\\"' * 60
    assert client.post("/tokenize", {"prompt": text})["count"] == len(text)


def test_bytes_of_open_bodies_are_counted_together():
    open_bytes = OpenBytes(10)
    open_bytes.add(6)
    open_bytes.add(4)
    with pytest.raises(HttpProblem, match="send the request again") as refusal:
        open_bytes.add(1)
    assert refusal.value.status == 503
