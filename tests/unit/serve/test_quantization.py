"""Replies of an engine that rounds weights say so in every shape; those of another engine have no such field."""

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from tests.unit.serve.conftest import Client

PROMPT = list(range(5, 12))
VLLM = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 3, "n": 2}}
BODIES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4, "seed": 3, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "seed": 3, "n": 2},
    "/inference/v1/generate": VLLM,
}


@pytest.fixture(scope="module")
def rounding(checkpoint):
    """A client of an engine with int8 codes."""
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=256, quantization="int8") as policy:
        yield Client(App(policy, ServeOptions(served_model_name="tiny")))


@pytest.mark.parametrize("path", BODIES)
def test_every_choice_says_it(rounding, client, path):
    choices = rounding.post(path, BODIES[path])["choices"]
    assert [choice["quantization"] for choice in choices] == ["int8", "int8"]
    assert not any("quantization" in choice for choice in client.post(path, BODIES[path])["choices"])


@pytest.mark.parametrize("path", BODIES)
def test_streamed_choices_say_it(rounding, path):
    choices = [choice for event in rounding.events(path, BODIES[path]) for choice in event["choices"]]
    ends = {choice["index"]: choice for choice in choices if choice["finish_reason"]}
    assert {index: choice["quantization"] for index, choice in ends.items()} == {0: "int8", 1: "int8"}


def test_sglangs_route_says_it(rounding, client):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    assert rounding.post("/generate", body)["quantization"] == "int8"
    assert "quantization" not in client.post("/generate", body)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_what_is_asked_about_the_server_says_it(rounding, client, path):
    for asked, expected in ((rounding, "int8"), (client, None)):
        info = asked.send("GET", path).json()
        assert info["quantization"] == expected and info["engine_config"]["quantization"] == expected
        assert info["vllm_config"]["model_config"]["quantization"] == expected
