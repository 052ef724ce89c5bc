"""Hints about KV, and the reset of a connector, in requests of every dialect."""

import re

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.testing import tiny_checkpoint

from .conftest import Client

PROMPT = list(range(3, 80))
CHAT = {"messages": [{"role": "user", "content": "hello there, how are you today?"}], "max_tokens": 2}
BODIES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello there, how are you today?", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=256, kv_connector="host") as made:
        yield Client(App(made))


@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_takes_hints(client, path):
    for hint in ("keep", "drop"):
        assert client.send("POST", path, {**BODIES[path], "kv_hint": hint}).status_code == 200
    problem = client.send("POST", path, {**BODIES[path], "kv_hint": "burn"})
    assert problem.status_code == 400 and "kv_hint" in problem.text


def test_a_prefetch_samples_nothing(client):
    answer = client.send("POST", "/v1/completions", {**BODIES["/v1/completions"], "kv_hint": "prefetch"}).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0


def num_held(client):
    text = client.send("GET", "/metrics").text
    return float(re.search(r"^rollout_engine_kv_connector_blocks\S* (\S+)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize("name", ["reset_external", "reset_connector"])
def test_the_connector_is_reset_if_that_is_asked_for(client, name):
    client.send("POST", "/v1/completions", BODIES["/v1/completions"])
    assert client.send("POST", "/reset_prefix_cache").json()["success"] and num_held(client) > 0
    assert client.send("POST", f"/reset_prefix_cache?{name}=true").json()["success"] and num_held(client) == 0
