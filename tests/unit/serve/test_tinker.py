"""Tinker's protocol without training: sessions, samplers, samples by futures, and their bounds."""

import numpy as np
import pytest

from rollout_engine import SamplingParams
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions

from .conftest import Client
from .tinker_client import TinkerClient, fields, own_output

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def app(policy, tmp_path):
    return App(policy, ServeOptions(served_model_name="tiny", tinker=str(tmp_path), tinker_waiting=3, tinker_clients=2))


@pytest.fixture
def tinker(app):
    return TinkerClient(Client(app))


def test_samples_are_the_engines_own(policy, tinker):
    params = SamplingParams(n=2, max_tokens=4, seed=7, logprobs=0)
    output = own_output(policy, PROMPT, params)
    found, message = tinker.sample(tinker.sampler(), PROMPT, 2)
    assert [ids for ids, _ in found] == [each.token_ids for each in output.outputs]
    for (_, logprobs), each in zip(found, output.outputs, strict=True):
        assert logprobs.tobytes() == each.logprobs.tobytes()
    assert 2 not in message and 3 not in message


def test_log_probs_of_the_prompt_are_those_of_its_last_tokens_if_asked(policy, tinker):
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=2)
    output = own_output(policy, PROMPT, params)
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_logprobs_last_n": 3}
    (_, message) = tinker.sample(tinker.sampler(), PROMPT, **asked)
    values = np.frombuffer(message[2][0], "<f4")
    assert np.isnan(values[:2]).all() and np.array_equal(values[2:], output.prompt_logprobs[2:])
    top = fields(message[3][0])
    ids, logprobs = (np.frombuffer(top[k][0], t).reshape(5, 2) for k, t in ((1, "<i4"), (2, "<f4")))
    assert top[3] == [2] and top[4] == [5]
    assert (ids[:2] == 0).all() and (logprobs[:2] == -99999.0).all()
    assert np.array_equal(ids[2:], output.prompt_top_logprobs[0][2:])
    assert fields(fields(message[1][0])[4][0])[3] == [2]


def test_a_request_that_is_sent_again_is_the_same_and_its_result_is_kept(tinker):
    sampler = tinker.sampler()
    first, again = (tinker.ask(sampler, PROMPT, 2, seq_id=40) for _ in range(2))
    assert first == again and first["sample_sequence_ids"] == [f"{first['request_id']}:{i}" for i in range(2)]
    assert tinker.result(first) == tinker.result(first)


def test_a_client_has_a_bounded_number_of_results_to_retrieve(tinker):
    sampler = tinker.sampler()
    tickets = [tinker.ask(sampler, PROMPT) for _ in range(3)]
    assert "tinker_waiting=3" in tinker.ask(sampler, PROMPT, status=429)["error"]["message"]
    tinker.result(tickets[0])
    tinker.post("cancel_future", {"request_id": tickets[1]["request_id"]})
    for _ in range(2):
        tinker.ask(sampler, PROMPT)
    tinker.ask(sampler, PROMPT, status=429)


def test_sessions_are_bounded_and_end(app, tinker):
    other = TinkerClient(tinker.client)
    assert "tinker_clients=2" in tinker.post("create_session", {}, status=429)["error"]["message"]
    ticket = other.ask(other.sampler(), PROMPT)
    other.post(f"sessions/{other.session}/finish", {"reason": {"type": "success"}, "detail": None})
    for name, body in (
        ("session_heartbeat", {"session_id": other.session}),
        ("retrieve_future", {"request_id": ticket["request_id"]}),
        ("create_sampling_session", {"session_id": other.session, "sampling_session_seq_id": 0, "base_model": "tiny"}),
    ):
        other.post(name, body, status=410)
    tinker.post("session_heartbeat", {"session_id": tinker.session})
    app.served.tinker.clients.get(tinker.session).heard_at -= 901
    app.served.tinker._sweep_at = 0.0
    assert (
        "tinker_idle_seconds"
        in tinker.post("session_heartbeat", {"session_id": tinker.session}, status=410)["error"]["message"]
    )


@pytest.mark.parametrize(
    "more, said",
    [
        ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "encoded_text"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"params": {"stop": ["a", 3]}}, "sampling_params.stop"),
        ({"params": {"top_p": 3.0}}, "top_p"),
        ({"sampling_session_id": None}, "sampling_session_id"),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_its_name(tinker, more, said):
    assert said in tinker.ask(tinker.sampler(), PROMPT, status=400, **more)["error"]["message"]


def test_what_is_unknown_is_not_found(tinker):
    assert "no sampler" in tinker.ask(f"{tinker.session}:sample:99", PROMPT, status=404)["error"]["message"]
    body = {"session_id": tinker.session, "sampling_session_seq_id": 0}
    tinker.post("create_sampling_session", body | {"base_model": "other"}, status=404)
    for path in ("tinker://a/weights/b", "tinker://../weights/b", "x", "tinker://a/weights/../b", "tinker://a/b/c"):
        problem = tinker.post("create_sampling_session", body | {"model_path": path}, status=400)["error"]
        assert problem["param"] in ("path", "model_id")
    assert "seeds" not in tinker.client.send("GET", "/api/v1/training_runs/abc").text


def test_a_server_without_a_trainer_says_how_to_have_one(tinker):
    body = {"session_id": tinker.session, "model_seq_id": 0, "base_model": "tiny"}
    assert "--tinker" in tinker.post("create_model", body, status=400)["error"]["message"]
    [model] = tinker.client.send("GET", "/api/v1/get_server_capabilities").json()["supported_models"]
    assert (model["model_name"], model["trainable"], model["sampleable"]) == ("tiny", False, True)


def test_a_server_that_was_started_without_it_does_not_speak_it(client):
    assert "--tinker" in client.problem("/api/v1/create_session", {}, status=404)["message"]


def test_samples_that_end_one_after_another_are_all_waited_for(policy, tinker):
    stop = list(range(3, 60))  # a fifth of the vocabulary
    params = SamplingParams(n=8, max_tokens=30, seed=7, logprobs=0, stop_token_ids=stop)
    output = own_output(policy, PROMPT, params)
    assert len({len(each.token_ids) for each in output.outputs}) > 1
    found, _ = tinker.sample(tinker.sampler(), PROMPT, 8, params={"max_tokens": 30, "stop": stop})
    assert [ids for ids, _ in found] == [each.token_ids for each in output.outputs]


def test_stops_end_a_sample(policy, tinker):
    sampler = tinker.sampler()
    [(ids, _)], _ = tinker.sample(sampler, PROMPT, params={"stop": []})
    assert len(ids) == 4
    [(cut, _)], message = tinker.sample(sampler, PROMPT, params={"stop": [ids[1]]})
    assert cut == ids[: ids.index(ids[1]) + 1]
