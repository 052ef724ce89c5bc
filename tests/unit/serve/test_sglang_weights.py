"""Weight updates in SGLang's dialect, as slime's and AReaL's trainers make them: whole or not at all."""

import asyncio
import base64
import contextlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import sync
from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.weights import get_weights_by_name
from rollout_engine.testing import tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import SIZES

from .conftest import Client
from .torch_trainer import GROUP, torch_trainer

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "sampling_seed": 1}, "return_logprob": True}


@pytest.fixture
def client(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=64) as made:
        yield Client(App(made))


def answer_of(client):
    """Log-probs of one completion, and the version that sampled it."""
    meta = client.post("/generate", PROMPT)["meta_info"]
    return [each[0] for each in meta["output_token_logprobs"]], meta["weight_version"]


def get(client, path):
    response = client.send("GET", path)
    assert response.status_code == 200, response.text
    return response.json()


@contextlib.contextmanager
def trainer(client, weights, folder):
    """A trainer in a group with the server; yields a function that sends tensors by name."""

    def join(port):
        where = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
        client.post("/init_weights_update_group", {**where, "group_name": GROUP, "backend": "gloo"})

    with torch_trainer(weights, folder, join) as broadcast:

        def send(names, **fields):
            broadcast(names)
            return client.post("/update_weights_from_distributed", columns_of(weights, names) | fields)

        yield send


def columns_of(weights, names):
    return {
        "names": names,
        "dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(weights[name].shape) for name in names],
        "group_name": GROUP,
    }


def encoded(weights):
    return [base64.b64encode(save(weights)).decode()]


def test_slimes_sequence_of_calls_changes_over_once_every_chunk_has_come(client, other_weights, tmp_path):
    before, _ = answer_of(client)
    names = list(other_weights)
    assert client.send("GET", "/health_generate").status_code == 200
    assert get(client, "/get_server_info")["tp_size"] == 1
    client.post("/destroy_weights_update_group", {"group_name": GROUP})
    with trainer(client, other_weights, tmp_path) as send:
        client.post("/pause_generation", {})
        get(client, "/flush_cache")
        half = send(names[:3], weight_version="4", flush_cache=False)
        assert half["success"] and half["num_missing"] == len(names) - 3 and half["weight_version"] == "0"
        refused = client.problem("/continue_generation", {}, status=409)
        assert names[3] in refused["message"]
        assert send(names[3:], weight_version="4", flush_cache=False)["weight_version"] == "4"
        client.post("/continue_generation", {})
    assert get(client, "/get_weight_version") == {"weight_version": "4"}
    after, version = answer_of(client)
    assert after != before and version == "4"
    client.post("/destroy_weights_update_group", {"group_name": GROUP})
    client.post("/release_memory_occupation", {})
    client.post("/resume_memory_occupation", {"tags": ["weights"]})
    client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(other_weights)})
    client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert answer_of(client) == (after, "5")


def test_areals_sequence_of_calls_loads_a_directory(client, other_weights, tmp_path):
    before, _ = answer_of(client)
    save_file(other_weights, tmp_path / "model.safetensors")
    assert client.send("POST", "/pause_generation").status_code == 200
    fields = {"model_path": str(tmp_path), "abort_all_request": True}
    assert client.post("/update_weights_from_disk", fields)["num_paused_requests"] == 0
    assert client.send("POST", "/continue_generation").status_code == 200
    after, version = answer_of(client)
    assert after != before and version == "1"
    sync.publish(tmp_path / "store", other_weights, 9)
    assert client.post("/update_weights_from_disk", {"model_path": str(tmp_path / "store")})["weight_version"] == 9
    assert answer_of(client) == (after, "9")


def test_tensors_of_a_body_and_an_update_that_is_begun_and_ended(client, other_weights):
    before, _ = answer_of(client)
    client.post("/begin_weight_update", {})
    told = client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(other_weights)})
    assert told["num_missing"] == 0 and answer_of(client) == (before, "0")
    assert "was not ended" in client.problem("/continue_generation", {}, status=409)["message"]
    assert client.post("/end_weight_update", {"weight_version": 3})["weight_version"] == 3
    assert client.post("/end_weight_update", {"weight_version": 3})["weight_version"] == 3
    assert answer_of(client)[1] == "3"


def test_an_update_of_which_nothing_has_come_is_not_reported_as_the_one_before(client, other_weights):
    body = {"serialized_named_tensors": encoded(other_weights)}
    assert client.post("/update_weights_from_tensor", {**body, "weight_version": 1})["weight_version"] == "1"
    assert client.post("/end_weight_update", {})["weight_version"] == 1, "the end of the update that has come"
    assert "no tensors have arrived" in client.problem("/end_weight_update", {}, status=409)["message"]
    client.post("/begin_weight_update", {})
    for fields in ({}, {"weight_version": 1}, {"weight_version": 2}):
        assert "no tensors have arrived" in client.problem("/end_weight_update", fields, status=409)["message"]
    assert "have not come" in client.problem("/continue_generation", {}, status=409)["message"]
    client.post("/update_weights_from_tensor", {**body, "weight_version": 2})
    assert client.post("/end_weight_update", {"weight_version": 2})["weight_version"] == 2
    client.problem("/update_weights_from_tensor", {"serialized_named_tensors": ["no"]})
    assert "no tensors have arrived" in client.problem("/end_weight_update", {}, status=409)["message"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("begun, sent", [(5, None), (None, 5), (5, 5)])
def test_an_update_has_the_version_that_was_given_at_its_begin_or_with_its_tensors(client, other_weights, begun, sent):
    client.post("/begin_weight_update", {"weight_version": begun})
    body = {"serialized_named_tensors": encoded(other_weights)}
    client.post("/update_weights_from_tensor", body | {"weight_version": sent})
    said = client.problem("/end_weight_update", {"weight_version": 6})["message"]
    assert "weight_version=6, and the update was begun as 5" in said
    assert client.post("/end_weight_update", {})["weight_version"] == 5


def test_tensors_of_another_version_than_the_one_begun_are_refused(client, other_weights):
    client.post("/begin_weight_update", {"weight_version": 5})
    body = {"serialized_named_tensors": encoded(other_weights), "weight_version": 6}
    assert "two updates" in client.problem("/update_weights_from_tensor", body)["message"]
    assert client.post("/update_weights_from_tensor", body | {"weight_version": 5})["success"]
    assert client.post("/end_weight_update", {"weight_version": 5})["weight_version"] == 5


def test_tensors_that_the_model_does_not_use_begin_no_update(client, other_weights):
    def send(tensors):
        return client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(tensors)})

    unused = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    for version, tensors in enumerate((other_weights, {name: each * 1.5 for name, each in other_weights.items()}), 1):
        assert send(tensors)["weight_version"] == str(version)
        assert send(unused)["weight_version"] == str(version)
        client.post("/continue_generation", {})
    assert client.app.served.updates.is_begun is False


def test_two_names_of_one_weight_are_refused_with_a_word(client, other_weights):
    name = "model.norm.weight"
    twice = {name: other_weights[name], name.removeprefix("model."): other_weights[name].clone()}
    body = {"serialized_named_tensors": encoded(twice)}
    assert "more than once" in client.problem("/update_weights_from_tensor", body)["message"]


SEVERAL_NAMES = {"llama": dict(tie_word_embeddings=True), "qwen3_moe": SIZES["qwen3_moe"]}


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", SEVERAL_NAMES)
def test_an_update_is_complete_with_every_weight_under_one_of_its_names(tmp_path, architecture):
    sizes = SEVERAL_NAMES[architecture]
    model = tiny_model(architecture, seed=4, **sizes)
    model.save_pretrained(tmp_path / "new")
    tiny_checkpoint(tmp_path / "old", architecture, seed=3, **sizes)
    with RolloutPolicy.from_pretrained(tmp_path / "old", max_model_len=64, num_kv_blocks=16) as policy:
        client = Client(App(policy))
        for version, weights in enumerate(
            (
                {name: tensor.detach().clone() for name, tensor in model.named_parameters()},
                load_file(tmp_path / "new" / "model.safetensors"),
                {name: tensor.clone() for name, tensor in model.state_dict().items()},
            ),
            1,
        ):
            names, common = list(weights), {"weight_version": str(version)}
            for some in (names[:-3], names[-3:]):
                body = {"serialized_named_tensors": encoded({name: weights[name] for name in some})} | common
                answer = client.post("/update_weights_from_tensor", body)
            assert answer["weight_version"] == str(version)
        assert policy.update_weights(model).version == 4
        info = get(client, "/weight_info")["weights"]
    assert info.keys() == dict(model.named_parameters()).keys()


def test_a_tied_head_that_comes_after_the_update_is_complete_belongs_to_it(tmp_path):
    model = tiny_model("llama", seed=4, tie_word_embeddings=True)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    tiny_checkpoint(tmp_path, "llama", seed=3, tie_word_embeddings=True)
    with RolloutPolicy.from_pretrained(tmp_path, max_model_len=64, num_kv_blocks=16) as policy:
        client = Client(App(policy))
        for version in (1, 2):
            for each in (weights, head):
                answer = client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(each)})
                assert answer["weight_version"] == str(version)
        changed = {"serialized_named_tensors": encoded({"lm_head.weight": head["lm_head.weight"] + 1})}
        client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(weights)})
        assert (
            "is live with other weights"
            in client.problem("/update_weights_from_tensor", changed, status=409)["message"]
        )


def test_a_part_is_committed_alone_only_where_that_is_asked_for(client, other_weights):
    name = next(iter(other_weights))
    body = {"serialized_named_tensors": encoded({name: other_weights[name]})}
    assert client.post("/update_weights_from_tensor", body)["weight_version"] == "0"
    client.post("/destroy_weights_update_group", {})
    assert client.post("/update_weights_from_tensor", {**body, "partial": True})["weight_version"] == "1"
    for each in list(other_weights)[1:3]:
        other = {"serialized_named_tensors": encoded({each: other_weights[each]}), "partial": True}
        assert client.post("/update_weights_from_tensor", other)["success"], "a part after another is no late one"
    whole = client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(other_weights)})
    assert whole["weight_version"] == "4"
    rows = client.post("/get_weights_by_name", {"name": name, "truncate_size": 2})
    assert rows == other_weights[name][:2].tolist()
    without_prefix = client.post("/get_weights_by_name", {"name": name.removeprefix("model."), "truncate_size": 2})
    assert without_prefix == rows


def test_a_weight_of_which_no_rank_has_a_whole_row_is_not_shown_as_one():
    class Split:
        """Two ranks, each with two of the four columns."""

        async def collective_rpc(self, method, args):
            return [[[1.0, 2.0]], [[3.0, 4.0]]]

        async def get_model_metadata(self):
            return {"down": ("float32", (1, 4))}

    with pytest.raises(HttpProblem, match="no rank has a whole row of 'down'.*deterministic=True"):
        asyncio.run(get_weights_by_name(SimpleNamespace(engine=Split()), SimpleNamespace(), name="down"))


def test_parts_of_two_updates_are_never_mixed(client, other_weights):
    first, *rest = other_weights
    body = {"serialized_named_tensors": encoded({first: other_weights[first]}), "weight_version": 1}
    client.post("/update_weights_from_tensor", body)
    others = encoded({name: other_weights[name] for name in rest})
    problem = client.problem("/update_weights_from_tensor", {"serialized_named_tensors": others, "weight_version": "2"})
    assert "they are of two updates" in problem["message"] and answer_of(client)[1] == "0"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "path, fields, status, said",
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVAAA="]}, 400, "Pickles are never read"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["%"]}, 400, "safetensors file in base64"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["", ""]}, 400, "this server is one rank"),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [""], "load_format": "flattened_bucket"},
            400,
            "one by one",
        ),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, "/nowhere"),
        ("/update_weight_version", {"new_version": "8"}, 409, "belongs to its weights"),
        ("/get_weights_by_name", {"name": "none"}, 400, "none"),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
            501,
            "give 'gloo'",
        ),
    ],
)
def test_what_cannot_be_done_says_so_and_changes_nothing(client, path, fields, status, said):
    problem = client.problem(path, fields, status=status)
    assert said in problem["message"]
    assert answer_of(client)[1] == "0"


def test_the_live_version_may_be_confirmed(client):
    assert client.post("/update_weight_version", {"new_version": "0"})["new_version"] == "0"


@pytest.mark.quick(1)
@pytest.mark.parametrize("order", [["kv_cache"], ["weights"], ["kv_cache", "weights"], ["weights", "kv_cache"]])
def test_memory_is_released_and_taken_back_tag_by_tag(client, other_weights, order):
    for tag in order:
        client.post("/release_memory_occupation", {"tags": [tag]})
    for tag in order:
        client.post("/resume_memory_occupation", {"tags": [tag]})
    if "weights" in order:
        client.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded(other_weights)})
    assert answer_of(client)[1] == str(int("weights" in order))
