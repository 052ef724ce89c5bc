"""Pauses, sleep and calls by name, over the routes that vLLM's clients call."""

import asyncio

import httpx2
import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.testing import random_adapter, save_adapter, tiny_checkpoint, tiny_model

from .conftest import Client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Of an engine that these tests pause."""
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path_factory.mktemp("paused")), max_model_len=256) as made:
        yield Client(App(made))


LONG = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "seed": 1, "return_token_ids": True}


def beside(client, *calls):
    """Responses of calls while a long completion runs, and then its own."""

    async def exchange():
        transport = httpx2.ASGITransport(client.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            running = asyncio.ensure_future(sender.post("/v1/completions", json=LONG))
            while not client.app.served.num_open:
                await asyncio.sleep(0.001)
            answers = [await sender.request(*call) for call in calls]
            return answers, await running

    return asyncio.run(exchange())


def test_a_pause_that_aborts_gives_what_there_is(client):
    (paused, refused, state, resumed), ended = beside(
        client,
        ("POST", "/pause?mode=abort"),
        ("POST", "/v1/completions"),
        ("GET", "/is_paused"),
        ("POST", "/resume"),
    )
    assert paused.json()["status"] == "paused" and state.json() == {"is_paused": True}
    assert refused.status_code == 400  # it has no prompt
    assert ended.json()["choices"][0]["finish_reason"] == "abort" and resumed.status_code == 200


def while_waiting(client, path, body, *calls):
    """The response of a request that waits in a paused engine until the last of these calls is made."""

    async def exchange():
        transport = httpx2.ASGITransport(client.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            waiting = asyncio.ensure_future(sender.post(path, json=body))
            while not client.app.served.num_open:
                await asyncio.sleep(0.001)
            for call in calls:
                assert not waiting.done()
                assert (await sender.request(*call)).status_code == 200
            return await waiting

    return asyncio.run(exchange())


BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_while_paused_requests_wait_and_are_answered_after_it(client, mode, path):
    client.post(f"/pause?mode={mode}")
    client.post(f"/pause?mode={mode}")  # asked twice it is the same
    assert client.send("GET", "/health").json()["is_paused"]
    response = while_waiting(client, path, BODIES[path], ("GET", "/is_paused"), ("POST", "/resume"))
    assert response.status_code == 200 and not client.send("GET", "/health").json()["is_paused"]


def test_an_engine_that_rejects_while_paused_tells_clients_to_come_again(tmp_path):
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path), max_model_len=64, admission="reject") as made:
        client = Client(App(made))
        client.post("/pause?mode=abort")
        response = client.send("POST", "/v1/completions", BODIES["/v1/completions"])
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        client.post("/resume")
        client.post("/v1/completions", BODIES["/v1/completions"])


def test_a_pause_that_keeps_freezes_requests_and_loses_no_token(client):
    undisturbed = client.post("/v1/completions", LONG)["choices"][0]["token_ids"]
    (*_, resumed), ended = beside(client, ("POST", "/pause?mode=keep&clear_cache=false"), ("POST", "/resume"))
    assert resumed.status_code == 200 and ended.json()["choices"][0]["token_ids"] == undisturbed


def test_requests_end_by_the_ids_that_clients_gave(client):
    async def exchange():
        transport = httpx2.ASGITransport(client.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            headers = {"x-request-id": "mine"}
            running = asyncio.ensure_future(sender.post("/v1/completions", json=LONG, headers=headers))
            while not client.app.served.num_open:
                await asyncio.sleep(0.001)
            other = await sender.post("/abort_requests", json={"request_ids": ["another"]})
            mine = await sender.post("/abort_requests", json={"request_ids": ["mine"]})
            return other.json(), mine.json(), await running

    other, mine, ended = asyncio.run(exchange())
    assert (other["num_aborted"], mine["num_aborted"]) == (0, 1)
    assert ended.json()["choices"][0]["finish_reason"] == "abort" and ended.headers["x-request-id"] == "mine"


def test_asleep_requests_wait_until_all_memory_is_back(client):
    client.post("/sleep", {"level": 1})
    assert client.send("GET", "/is_sleeping").json() == {"is_sleeping": True}
    calls = [("POST", "/wake_up?tags=kv_cache"), ("POST", "/wake_up?tags=weights")]
    assert while_waiting(client, "/v1/completions", BODIES["/v1/completions"], *calls).status_code == 200
    client.post("/sleep", {"level": 1})
    assert client.post("/wake_up?tags=kv_cache")["status"] == "asleep"
    assert client.post("/wake_up?tags=kv_cache&tags=weights")["status"] == "awake"


@pytest.mark.parametrize(
    "path, body, field",
    [
        ("/sleep", {"level": 3}, "level"),
        ("/sleep?level=3", None, "level"),
        ("/sleep", {"mode": "now"}, "mode"),
        ("/sleep", {"drain_timeout": -1}, "drain_timeout"),
        ("/sleep", {"tags": ["weights"]}, "tags"),
        ("/wake_up", {"tags": ["weight"]}, "tags"),
        ("/pause", {"drain_timeout": 0}, "drain_timeout"),
    ],
)
def test_a_sleep_that_cannot_be_names_its_field(client, path, body, field):
    assert client.problem(path, body)["param"] == field
    assert client.send("GET", "/is_sleeping").json() == {"is_sleeping": False}


def test_level_0_stops_scheduling_alone_until_it_is_woken(client):
    client.post("/sleep", {"level": 0})
    assert client.send("GET", "/is_sleeping").json() == {"is_sleeping": True}
    calls = [("POST", "/wake_up?tags=scheduling")]
    assert while_waiting(client, "/v1/completions", BODIES["/v1/completions"], *calls).status_code == 200
    client.post("/sleep", {"level": 0, "mode": "keep"})
    assert client.post("/wake_up")["status"] == "awake"


@pytest.mark.parametrize("tags", [[], ["weights", "kv_cache", "scheduling"]])
def test_all_memory_is_woken_by_any_of_vllms_calls(client, tags):
    client.post("/sleep", {"level": 1})
    assert client.post("/wake_up", {"tags": tags})["status"] == "awake"


@pytest.mark.parametrize("mode", ["raw", "raw_logprobs", "processed_logprobs", "tempered_logprobs"])
def test_a_mode_of_log_probs_has_vllms_name_too(client, mode):
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "logprobs": 0, "seed": 1, "temperature": 0.5}}
    answers = []
    for name in (mode, mode.removesuffix("_logprobs")):
        body["sampling_params"]["logprobs_mode"] = name
        answers.append(client.post("/inference/v1/generate", body)["choices"][0]["logprobs"])
    assert answers[0] == answers[1]


def test_methods_are_called_by_name(client):
    names = client.send("GET", "/weight_info").json()["weights"]
    [digests] = client.post("/collective_rpc", {"method": "get_tensor_digests"})["results"]
    assert digests.keys() == names.keys()
    assert "no_such_method" in client.problem("/collective_rpc", {"method": "no_such_method"})["message"]


def test_what_is_not_served_says_what_to_do(client):
    assert "weight_dir" in client.problem("/init_broadcaster", {"host": "a"}, status=501)["message"]


def test_what_is_asked_about_the_server_is_told(client):
    info = client.send("GET", "/server_info?config_format=json").json()
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "gloo"}
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "tempered_logprobs"
    assert info["context_length"] == 256 and info["tp_size"] == 1
    assert client.send("GET", "/get_world_size").json() == {"world_size": 1}
    assert client.send("GET", "/load").json() == {"server_load": 0}
    for path in ("/health", "/ping", "/liveness", "/health_generate"):
        assert client.send("GET", path).status_code == 200


def test_adapters_are_loaded_named_as_models_and_unloaded(client, tmp_path):
    made = random_adapter(tiny_model(), "math")
    save_adapter(tmp_path / "one", made)
    save_adapter(tmp_path / "two", random_adapter(tiny_model(), "math", seed=1))
    ask = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def tokens(model):
        answer = client.post("/v1/completions", ask | {"model": model})
        assert answer["model"] == (model if model == "math" else client.app.served.model)
        return answer["choices"][0]["token_ids"]

    base = tokens("default")
    assert "does not exist" in client.problem("/v1/completions", ask | {"model": "math"}, status=404)["message"]
    body = {"lora_name": "math", "lora_path": str(tmp_path / "one")}
    assert client.post("/v1/load_lora_adapter", body)["adapter"]["rank"] == 8
    names = [(each["id"], each["parent"]) for each in client.send("GET", "/v1/models").json()["data"]]
    assert names == [(client.app.served.model, None), ("math", client.app.served.model)]
    first = tokens("math")
    assert first != base == tokens("default")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
    answers = [client.post("/v1/chat/completions", chat | {"model": model}) for model in ("math", "default")]
    assert answers[0]["choices"] != answers[1]["choices"] and answers[0]["model"] == "math"
    other = {"lora_name": "math", "lora_path": str(tmp_path / "two")}
    assert "revision" in client.problem("/v1/load_lora_adapter", other)["message"]
    assert client.post("/load_lora_adapter", other | {"load_inplace": True})["adapter"]["revision"] == 1
    assert tokens("math") != first
    problem = client.problem("/v1/load_lora_adapter", body | {"lora_path": "/nowhere"})
    assert "cannot be read" in problem["message"] and problem["param"] == "lora_path"
    problem = client.problem("/v1/load_lora_adapter", body | {"lora_name": ""})
    assert problem["message"].startswith("lora_name=''") and problem["param"] == "lora_name"
    assert client.post("/v1/unload_lora_adapter", {"lora_name": "math"})["success"]
    assert "no adapter" in client.problem("/unload_lora_adapter", {"lora_name": "math"}, status=404)["message"]
