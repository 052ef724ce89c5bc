"""Requests that real clients sent (tests/clients records them) still get what those clients read."""

import json

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.rollouts.tinker import lora_trainer
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from tests.transcripts import FOLDER, missing, replay, response_shape, served_checkpoint, shape_of
from tests.unit.serve.conftest import Client

FILES = sorted(FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return served_checkpoint(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def client(checkpoint, tmp_path, request):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=2048, seed=3) as policy:
        trainer = lora_trainer(policy) if "tinker" in request.node.name else None
        app = App(policy, ServeOptions(served_model_name="tiny", tinker=str(tmp_path)), trainer)
        yield Client(app)
        app.served.tinker.close()


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_recorded_client_still_gets_what_it_reads(client, checkpoint, file):
    calls = json.loads(file.read_text().replace("$CHECKPOINT", str(checkpoint)))["calls"]
    assert calls
    sessions = {}
    for call in calls:
        response = replay(client.send, call, sessions)
        where = f"{call['method']} {call['path']}"
        assert response.status_code == call["status"], f"{where}: {response.text}"
        shape = response_shape(response.headers["content-type"], response.content)
        assert missing(call["response"], shape) == [], where


def test_a_field_that_is_gone_or_of_another_type_is_found():
    recorded = shape_of({"choices": [{"text": "a", "logprob": None}, {"text": "b", "logprob": 1.5}], "top": []})
    assert recorded == {"choices": [{"text": "string", "logprob": {"any of": ["null", "number"]}}], "top": []}
    assert missing(recorded, shape_of({"choices": [{"text": "c", "logprob": 2}], "top": [], "more": True})) == []
    assert missing(recorded, shape_of({"choices": [{"text": "c"}], "top": []})) == ["$.choices[].logprob is gone"]
    assert missing(recorded, shape_of({"choices": [{"text": 3, "logprob": 1}], "top": []})) == [
        "$.choices[].text: number, not string"
    ]
    assert missing(recorded, shape_of({"choices": 3, "top": []})) != []
    assert missing(recorded, shape_of({"choices": [], "top": []})) == ["$.choices is empty"]


def test_the_first_event_of_a_stream_is_missed_too():
    recorded = shape_of([{"role": "assistant", "content": ""}, {"content": "a"}])
    assert missing(recorded, shape_of([{"role": "assistant", "content": "b"}, {"content": ""}])) == []
    assert missing(recorded, shape_of([{"content": "b"}])) == ["$[].role is gone"]
