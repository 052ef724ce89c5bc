"""Adapters over HTTP: loaded from a directory or from tensors, and named by requests of both dialects."""

import base64
import pickle

import pytest
from safetensors.torch import save

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.testing import random_adapter, tiny_model

from .conftest import Client

VLLM = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0}}
SGLANG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}


@pytest.fixture
def client(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=64, max_loras=2) as made:
        yield Client(App(made))


def tensors_body(name="math", seed=0, **fields):
    made = random_adapter(tiny_model(), name, seed=seed)
    text = base64.b64encode(save(made.tensors)).decode()
    return {"lora_name": name, "config_dict": made.config, "serialized_tensors": text, **fields}


def load(client, **fields):
    return client.post("/load_lora_adapter_from_tensors", tensors_body(**fields))["adapter"]


def sglang_problem(client, path, body, *, status=400):
    """The error of a response, in SGLang's shape."""
    response = client.send("POST", path, body)
    found = response.json()
    assert response.status_code == status and found["success"] is False, response.text
    return found


def vllm(client, **fields):
    return client.post("/inference/v1/generate", VLLM | fields)


def vllm_ids(client, **fields):
    return vllm(client, **fields)["choices"][0]["token_ids"]


def sglang_ids(client, **fields):
    return client.post("/generate", SGLANG | fields)["output_ids"]


def test_an_adapter_comes_from_tensors_and_both_dialects_name_it(client):
    base = vllm_ids(client)
    assert load(client)["rank"] == 8
    with_adapter = vllm(client, model="math")
    ids = with_adapter["choices"][0]["token_ids"]
    assert with_adapter["model"] == "math" and ids != base
    named = {"lora_name": "math", "lora_int_id": 1, "lora_path": "/not/read"}
    assert ids == vllm_ids(client, lora_request="math") == vllm_ids(client, lora_request=named)
    assert ids == vllm_ids(client, model="math", lora_request="math") == sglang_ids(client, lora_path="math")
    assert base == vllm_ids(client, model="default") == sglang_ids(client) == sglang_ids(client, lora_path="")
    batch = client.post("/generate", SGLANG | {"input_ids": [[5, 6, 7]] * 2, "lora_path": ["math", None]})
    assert [each["output_ids"] for each in batch] == [ids, base]


def test_other_tensors_take_the_place_of_known_ones_as_a_version(client):
    assert load(client)["policy_version"] == 0
    first = sglang_ids(client, lora_path="math")
    problem = sglang_problem(client, "/load_lora_adapter_from_tensors", tensors_body(seed=1))
    assert "revision=0" in problem["message"]
    assert sglang_ids(client, lora_path="math") == first
    found = load(client, seed=1, load_inplace=True, pinned=True)
    assert (found["revision"], found["policy_version"], found["is_pinned"]) == (1, 1, True)
    answer = client.post("/generate", SGLANG | {"lora_path": "math"})
    assert answer["output_ids"] != first and answer["meta_info"]["weight_version"] == "1"
    loaded = client.post("/load_lora_adapter_from_tensors", tensors_body("other"))["loaded_adapters"]
    assert list(loaded) == ["math", "other"]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"serialized_tensors": "%"}, "base64"),
        ({"serialized_tensors": base64.b64encode(pickle.dumps({"a": 1})).decode()}, "Pickles are never read"),
        ({"load_format": "flattened_bucket"}, "safetensors"),
        ({"lora_name": "default"}, "another name than the model's"),
        ({"config_dict": {"peft_type": "IA3"}}, "peft_type"),
        ({"added_tokens_config": {"a": 1}}, "added_tokens_config"),
        ({"lora_nam": "x"}, "Did you mean 'lora_name'"),
    ],
)
def test_tensors_that_cannot_be_served_change_nothing(client, fields, said):
    assert said in sglang_problem(client, "/load_lora_adapter_from_tensors", tensors_body() | fields)["message"]
    assert [each["id"] for each in client.send("GET", "/v1/models").json()["data"]] == [client.app.served.model]


def test_an_unknown_adapter_is_named_in_the_shape_of_the_dialect(client):
    load(client)
    problem = sglang_problem(client, "/generate", SGLANG | {"lora_path": "maths"}, status=404)
    assert "The adapter 'maths' does not exist" in problem["message"]
    for fields, param in (({"model": "maths"}, "model"), ({"lora_request": "maths"}, "lora_request")):
        problem = client.problem("/inference/v1/generate", VLLM | fields, status=404)
        assert "'maths' does not exist" in problem["message"] and problem["param"] == param
    both = client.problem("/inference/v1/generate", VLLM | {"model": "math", "lora_request": "other"})
    assert "the adapter 'math', which model names" in both["message"] and both["param"] == "lora_request"


def test_trainers_are_told_how_many_adapters_there_may_be(client):
    config = client.send("GET", "/server_info").json()["vllm_config"]["lora_config"]
    assert config == {"max_loras": 2, "max_lora_rank": 64}
