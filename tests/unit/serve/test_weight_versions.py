"""Any text as a version of weights, as clients of vLLM and SGLang give it."""

import base64

import pytest
from safetensors.torch import save, save_file

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.serve.route import body_of
from rollout_engine.serve.version_names import VersionNames
from rollout_engine.serve.weights import update_weights

from .conftest import Client


@pytest.fixture
def client(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=64) as made:
        yield Client(App(made))


def tensors(weights):
    return {"serialized_named_tensors": [base64.b64encode(save(weights)).decode()]}


def test_a_text_without_a_number_names_the_version_of_its_update(client, other_weights):
    halves = dict(list(other_weights.items())[:3]), dict(list(other_weights.items())[3:])
    for half in halves:
        client.post("/update_weights_from_tensor", tensors(half) | {"weight_version": "after-warm-up"})
    assert client.send("GET", "/get_weight_version").json() == {"weight_version": "after-warm-up"}
    assert client.send("GET", "/get_model_info").json()["weight_version"] == "after-warm-up"
    meta = client.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})["meta_info"]
    assert meta["weight_version"] == "after-warm-up" and meta["weight_versions"][0]["version"] == "after-warm-up"
    inference = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    [choice] = client.post("/inference/v1/generate", inference)["choices"]
    assert choice["weight_version"] == 1 and choice["weight_versions"][0]["version"] == "after-warm-up"
    named = client.post("/update_weight_version", {"new_version": "best"})
    assert named["new_version"] == "best"
    assert client.send("GET", "/get_weight_version").json() == {"weight_version": "best"}


def test_the_parts_of_one_update_have_one_text(client, other_weights):
    first, *_ = other_weights
    client.post("/update_weights_from_tensor", tensors({first: other_weights[first]}) | {"weight_version": "a"})
    rest = {name: tensor for name, tensor in other_weights.items() if name != first}
    assert client.send("POST", "/update_weights_from_tensor", tensors(rest) | {"weight_version": 7}).status_code == 400


def test_the_path_of_an_update_from_disk_is_the_models(client, other_weights, tmp_path):
    before = client.send("GET", "/get_model_info").json()["model_path"]
    save_file(other_weights, tmp_path / "model.safetensors")
    client.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "disk"})
    info = client.send("GET", "/get_model_info").json()
    assert info["model_path"] == str(tmp_path) != before and info["weight_version"] == "disk"
    assert client.send("GET", "/server_info").json()["model_path"] == str(tmp_path)


def test_an_update_that_failed_names_no_version(client, other_weights, tmp_path):
    client.problem("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "lost"})
    save_file(other_weights, tmp_path / "model.safetensors")
    client.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert client.send("GET", "/get_weight_version").json() == {"weight_version": "1"}


def test_a_text_stands_for_one_version_until_another_has_taken_its_number():
    live = [0]
    names = VersionNames(lambda: live[0])

    def read(text):
        body = body_of(update_weights)(weight_dir="x", weight_version=text)
        return names.read(body), body.weight_version

    assert [read(text)[1] for text in ("a", "a", "weight_v000042", "default")] == [1, 1, "weight_v000042", "default"]
    named, number = read("b")
    assert number == 1  # "a" was never committed
    names.confirm(named)
    assert names.text_of(1) == "1"  # nor is "b" yet
    live[0] = 1
    names.confirm(named)
    assert (read("b")[1], read("a")[1]) == (1, 2) and names.text_of(1) == "b" and names.text_of(9) == "9"
