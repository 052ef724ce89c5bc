"""Adapters over HTTP: loaded from a directory or from tensors, and named by requests of both dialects."""

import base64
import pickle
import re

import pytest
from safetensors.torch import save

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.testing import random_adapter, save_adapter, tiny_model

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


def test_an_adapter_is_the_model_of_routes_that_pool(client):
    load(client)
    for path, body in (("/v1/embeddings", {"input": [5, 6, 7]}), ("/score", {"text_1": "a", "text_2": ["b"]})):
        base, other = (client.post(path, {**body, "model": model}) for model in ("default", "math"))
        assert other["model"] == "math" and base["model"] != "math" and base["data"] != other["data"]
        problem = client.problem(path, {**body, "model": "maths"}, status=404)
        assert "The model 'maths' does not exist" in problem["message"]


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


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"serialized_tensors": "%"}, "base64"),
        ({"serialized_tensors": "@@@"}, "It cannot be read: Only base64 data is allowed."),
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


def test_what_is_wrong_with_an_adapter_is_said_in_the_words_of_the_routes(client, tmp_path):
    load(client)
    save_adapter(tmp_path, random_adapter(tiny_model(), "math", seed=1))
    body = {"lora_name": "math", "lora_path": str(tmp_path)}

    def said(path, body, status=400):
        problem = client.problem(path, body, status=status)
        assert not re.search(r"add_lora|remove_lora|lora_request|LoRARequest|or None", problem["message"])
        return problem["param"], problem["message"]

    param, text = said("/v1/load_lora_adapter", body)
    assert param == "revision" and '"load_inplace": true' in text and "POST /v1/unload_lora_adapter" in text
    param, text = said("/v1/load_lora_adapter", body | {"lora_path": "/nowhere"})
    assert param == "lora_path" and text.startswith("/nowhere/adapter_config.json cannot be read")
    assert said("/v1/load_lora_adapter", body | {"lora_path": ""})[0] == "lora_path"
    assert said("/v1/unload_lora_adapter", {"lora_name": ""})[0] == "lora_name"
    assert "this server has 'math'" in said("/v1/unload_lora_adapter", {"lora_name": "maths"}, status=404)[1]
    tensors = tensors_body("other")
    param, text = said("/load_lora_adapter_from_tensors", tensors | {"config_dict": {}})
    assert param == "config_dict.lora_alpha" and text.startswith("config_dict.lora_alpha=None")
    assert said("/load_lora_adapter_from_tensors", tensors | {"lora_name": ""})[0] == "lora_name"
    for name in ("other", "math"):
        load(client, name=name, pinned=True)
    _, text = said("/v1/load_lora_adapter", body | {"lora_name": "third"}, status=409)
    assert text.startswith("no slot is free for 'third'") and "POST /v1/unload_lora_adapter" in text
