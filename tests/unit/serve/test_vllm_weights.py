"""Weight updates over HTTP: whole or not at all, over a torch group or from a directory."""

import asyncio
import contextlib

import pytest
from safetensors.torch import save_file

import sync
from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App

from .conftest import Client
from .torch_trainer import GROUP, torch_trainer

PROMPT = {"prompt": [5, 6], "max_tokens": 8, "seed": 1, "logprobs": 0}


@pytest.fixture
def client(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=64) as made:
        yield Client(App(made))


def answer_of(client):
    [choice] = client.post("/v1/completions", PROMPT)["choices"]
    return choice["logprobs"]["token_logprobs"], choice["version_spans"]


def test_a_published_store_and_a_checkpoint_are_loaded_from_their_directories(client, other_weights, tmp_path):
    before, _ = answer_of(client)
    sync.publish(tmp_path / "store", other_weights, 7)
    report = client.post("/update_weights", {"weight_dir": str(tmp_path / "store")})
    assert report["weight_version"] == report["report"]["version"] == 7 and report["success"]
    after, spans = answer_of(client)
    assert after != before and spans == [[0, 8, 7, 7]]
    (tmp_path / "plain").mkdir()
    save_file(other_weights, tmp_path / "plain/model.safetensors")
    report = client.post("/fetch_weights", {"uri": f"file://{tmp_path}/plain", "target_version": "weight_v000009"})
    assert report["weight_version"] == 9 and answer_of(client)[0] == after


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "path, fields, said",
    [
        ("/update_weights", {}, "one of them"),
        ("/update_weights", {"weight_dir": "/nowhere"}, "/nowhere"),
        ("/fetch_weights", {"uri": "s3://bucket"}, "directory of this machine"),
        ("/update_weights", {"weight_dir": "x", "weight_version": -1}, "whole number"),
        ("/update_weights", {"weight_dir": "x", "weight_version": "x" * 257}, "at most 256 characters"),
    ],
)
def test_weights_that_cannot_be_found_change_nothing(client, path, fields, said):
    assert said in client.problem(path, fields)["message"]
    assert answer_of(client)[1] == [[0, 8, 0, 0]]


@contextlib.contextmanager
def trainer(client, weights, folder):
    """A trainer in a group with the server; yields a function that sends tensors by name."""

    def join(port):
        init = {"master_address": "127.0.0.1", "master_port": str(port), "world_size": 2, "group_name": GROUP}
        client.post("/init_weight_transfer_engine", {"init_info": init})

    with torch_trainer(weights, folder, join) as broadcast:

        def send(names, **fields):
            broadcast(names)
            dtypes, shapes = ([str(weights[n].dtype) for n in names], [list(weights[n].shape) for n in names])
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            client.post("/update_weights", {"update_info": info, **fields})

        yield send


@pytest.mark.slow
def test_tensors_come_over_a_plain_torch_group(client, other_weights, tmp_path):
    names = list(other_weights)
    before, _ = answer_of(client)
    with trainer(client, other_weights, tmp_path) as send:
        client.post("/start_weight_update", {"is_checkpoint_format": True})
        send(names[:2])
        assert answer_of(client) == (before, [[0, 8, 0, 0]]), "nothing of an unfinished update is live"
        assert names[2] in client.problem("/finish_weight_update")["message"]
        assert answer_of(client) == (before, [[0, 8, 0, 0]])
        client.post("/start_weight_update")
        send(names[:2], weight_version=4)
        send(names[2:])
        assert client.post("/finish_weight_update")["weight_version"] == 4
    after, spans = answer_of(client)
    assert after != before and spans == [[0, 8, 4, 4]]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "columns, said",
    [
        ((["a"], ["float32"], []), "1 name, 1 dtype, 0 shapes"),
        ((["a"], ["float99"], [[1]]), "float99"),
        ((["a"], ["float32"], [[10**6, 10**6]]), "another model"),
        ((["a", "a"], ["float32"] * 2, [[1]] * 2), "announced"),
    ],
)
def test_what_cannot_be_weights_is_refused_before_any_is_received(client, columns, said):
    class Group:
        def receive(self, specs):
            raise AssertionError("nothing is to be received")

    client.app.served.updates.group = Group()
    info = dict(zip(("names", "dtype_names", "shapes"), columns, strict=True))
    assert said in client.problem("/update_weights", {"update_info": info})["message"]


def test_without_a_group_tensors_cannot_come(client):
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    assert "init route" in client.problem("/update_weights", {"update_info": info}, status=409)["message"]


def test_a_trainer_that_does_not_come_is_not_waited_for(client):
    init = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2, "timeout": 0.2}
    problem = client.problem("/init_weight_transfer_engine", {"init_info": init}, status=504)
    assert "did not form at 127.0.0.1:9" in problem["message"]


def test_an_update_is_committed_once_however_often_it_is_finished(client, other_weights):
    asyncio.run(client.app.served.updates.add(other_weights.items()))
    first = client.post("/finish_weight_update", {"weight_version": 3})
    assert first["weight_version"] == 3 and client.post("/finish_weight_update", {"weight_version": 3}) == first
    assert answer_of(client)[1] == [[0, 8, 3, 3]]


def test_an_update_of_which_nothing_has_come_is_not_reported_as_the_one_before(client, other_weights, tmp_path):
    assert "no tensors have arrived" in client.problem("/finish_weight_update", status=409)["message"]
    asyncio.run(client.app.served.updates.add(other_weights.items()))
    assert client.post("/finish_weight_update")["weight_version"] == 1
    problem = client.problem("/finish_weight_update", status=409)
    assert "The last update was that to version 1" in problem["message"]
    client.post("/start_weight_update")
    assert (
        "no tensors have arrived"
        in client.problem("/finish_weight_update", {"weight_version": 1}, status=409)["message"]
    )
    client.post("/start_weight_update")
    sync.publish(tmp_path / "store", other_weights, 9)
    client.post("/update_weights", {"weight_dir": str(tmp_path / "store")})
    assert client.post("/finish_weight_update")["weight_version"] == 9, "its weights have come, and it is live"
    client.problem("/finish_weight_update", status=409)


def test_weights_are_compared_by_their_digests(client, other_weights):
    assert "snapshot" in client.problem("/weight_checker", {"action": "compare"}, status=409)["message"]
    client.post("/weight_checker", {"action": "snapshot"})
    assert client.post("/weight_checker", {"action": "compare"})["changed"] == []
    asyncio.run(client.app.served.updates.add(other_weights.items()))
    client.post("/finish_weight_update")
    checksums = client.post("/weight_checker")["checksums"]
    assert set(client.post("/weight_checker", {"action": "compare"})["changed"]) == set(checksums)
