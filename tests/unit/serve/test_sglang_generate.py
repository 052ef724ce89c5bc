"""/generate gives the policy's own tokens and log-probs, in the shapes that SGLang's clients read."""

import asyncio

import httpx2
import numpy as np
import pytest

from rollout_engine import SamplingParams

IDS = [5, 6, 7]


def asked(max_new_tokens=6, **settings):
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": max_new_tokens, **settings}, "return_logprob": True}


def values(entries):
    return np.array([each[0] for each in entries], np.float32).tobytes()


def test_tokens_and_log_probs_are_the_policys_to_the_bit(policy, client):
    answer = client.post("/generate", asked(sampling_seed=11, temperature=0.7, top_k=1 << 30))
    params = SamplingParams(seed=11, temperature=0.7, max_tokens=6)
    batch = policy.rollout([IDS], params, use_tqdm=False)
    assert answer["output_ids"] == batch["tokens", "response"][0].tolist()
    meta = answer["meta_info"]
    assert values(meta["output_token_logprobs"]) == batch["log_probs", "response"][0].numpy().tobytes()
    assert [each[1:] for each in meta["output_token_logprobs"]] == [[i, None] for i in answer["output_ids"]]
    live = policy.policy_version
    assert meta["finish_reason"] == {"type": "length", "length": 6} and meta["input_token_logprobs"] == []
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (3, 6, str(live))
    assert meta["weight_versions"] == [{"version": str(live), "start": 0, "end": 6}]
    assert answer["weight_version"] == live and answer["version_spans"] == [[0, 6, live, live]]


def test_prompts_are_scored_without_a_token_of_the_answer(client):
    scored = {"logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    answer = client.post("/generate", {**asked(0), **scored})
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"], meta["output_token_logprobs"]) == ([], "", [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    (first, *rest), top = meta["input_token_logprobs"], meta["input_top_logprobs"]
    codec = client.app.served.codec
    assert first == [None, 5, codec.decode([5])] and top[0] is None and [len(row) for row in top[1:]] == [2, 2]
    [direct] = asyncio.run(client.app.served.engine.score([IDS[:1]], [IDS[1:]]))
    assert values(rest) == np.asarray(direct, np.float32).tobytes()


def test_log_probs_of_chosen_tokens(client):
    meta = client.post("/generate", {**asked(3), "token_ids_logprob": [1, 2]})["meta_info"]
    rows = meta["output_token_ids_logprobs"]
    assert [[each[1] for each in row] for row in rows] == [[1, 2]] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_is_answered_prompt_by_prompt(client, n):
    body = {
        "text": ["hello", "world"],
        "sampling_params": [{"max_new_tokens": length, "n": n, "ignore_eos": True} for length in (2, 3)],
        "rid": ["a", "b"],
        "return_prompt_token_ids": True,
    }
    answers = client.post("/generate", body)
    assert [len(each["output_ids"]) for each in answers] == [2] * n + [3] * n
    names = [each["meta_info"]["id"] for each in answers]
    assert names == (["a", "b"] if n == 1 else ["a-0", "a-1", "b-0", "b-1"])
    codec = client.app.served.codec
    assert codec.decode(answers[-1]["prompt_token_ids"]) == "world"


def test_a_stream_gives_all_so_far_with_each_event(client):
    body = asked(5, sampling_seed=3)
    whole, events = client.post("/generate", body), client.events("/generate", body)
    assert [len(event["output_ids"]) for event in events] == sorted(len(event["output_ids"]) for event in events)
    for event in events[:-1]:
        assert event["meta_info"]["finish_reason"] is None
        assert whole["output_ids"][: len(event["output_ids"])] == event["output_ids"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


def test_a_stop_token_is_named(client):
    first = client.post("/generate", asked(1, sampling_seed=3))["output_ids"][0]
    meta = client.post("/generate", asked(8, sampling_seed=3, stop_token_ids=[first]))["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": first}


@pytest.mark.parametrize(
    "body, said",
    [
        ({}, "input_ids in its place"),
        ({"text": "a", "input_ids": [1]}, "input_ids in its place"),
        ({"text": ""}, "not empty"),
        ({"text": "a", "sampling_params": {"max_new_tokns": 1}}, "Did you mean 'max_new_tokens'"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature=-1"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "JSON text"),
        ({"text": "a", "sampling_params": {"structural_tag": "{"}}, "a structural tag as JSON"),
        ({"text": ["a", "b"], "rid": ["x"]}, "a list of 2"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": ["a", "b"], "lora_path": ["x"]}, "a list of 2"),
        ({"txt": "a"}, "Did you mean 'text'"),
    ],
)
def test_what_is_wrong_is_named_in_sglangs_shape(client, body, said):
    response = client.send("POST", "/generate", body)
    problem = response.json()
    assert response.status_code == 400 and said in problem["message"] and problem["success"] is False


def test_an_aborted_request_gives_what_there_is_and_a_pause_lets_new_ones_wait(client):
    async def exchange():
        transport = httpx2.ASGITransport(client.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            long = {**asked(200, ignore_eos=True), "rid": "step7-sample3"}
            running = asyncio.ensure_future(sender.post("/generate", json=long))
            while not client.app.served.num_open:
                await asyncio.sleep(0.001)
            assert (await sender.post("/abort_request", json={"rid": "step8"})).json()["num_aborted"] == 0
            assert (await sender.post("/abort_request", json={"rid": "step7"})).json()["num_aborted"] == 1
            ended = (await running).json()
            assert ended["meta_info"]["finish_reason"]["type"] == "abort"
            await sender.post("/pause_generation", json={})
            waiting = asyncio.ensure_future(sender.post("/generate", json=asked(2)))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await sender.post("/continue_generation", json={})
            assert len((await waiting).json()["output_ids"]) == 2

    asyncio.run(exchange())
