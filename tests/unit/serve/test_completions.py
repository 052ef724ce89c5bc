import asyncio

import numpy as np
import pytest

from rollout_engine import SamplingParams
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions

from .conftest import Client

PROMPT = [5, 6, 7]


def direct(policy, prompts, **settings):
    batch = policy.rollout(prompts, SamplingParams(**settings), use_tqdm=False)
    lengths = batch["masks", "response"].sum(1).tolist()
    tokens = [row[:n] for row, n in zip(batch["tokens", "response"].tolist(), lengths, strict=True)]
    logprobs = [row[:n] for row, n in zip(batch["log_probs", "response"].tolist(), lengths, strict=True)]
    return tokens, logprobs


def test_tokens_and_log_probs_are_those_of_the_policy_to_the_bit(policy, client):
    body = {"prompt": [PROMPT, [8, 9]], "seed": 11, "max_tokens": 6, "n": 2, "logprobs": 0, "return_token_ids": True}
    choices = client.post("/v1/completions", body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for prompt, pair in zip([PROMPT, [8, 9]], (choices[:2], choices[2:]), strict=True):
        for choice in pair:
            tokens, logprobs = direct(policy, [prompt], seed=choice["seed"], max_tokens=6, logprobs=0)
            assert choice["token_ids"] == tokens[0] and choice["prompt_token_ids"] == prompt
            sent = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            assert sent.tobytes() == np.array(logprobs[0], np.float32).tobytes()
            assert choice["version_spans"] == [[0, 6, policy.policy_version, policy.policy_version]]


def test_a_body_may_leave_itself_out_of_speculation(client, policy, monkeypatch):
    seen = []
    add = policy.frontend.client.add_request
    monkeypatch.setattr(policy.frontend.client, "add_request", lambda r, route: (seen.append(r.params), add(r, route)))
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "speculation": False}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1, "speculation": False}}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ):
        client.post(path, body)
    assert [params.speculation for params in seen] == [False, False, True]


def test_a_stream_gives_the_same_as_a_whole_response(client):
    body = {"prompt": "hello", "seed": 1, "max_tokens": 8, "n": 2, "logprobs": 1, "return_token_ids": True}
    whole = client.post("/v1/completions", body)
    events = client.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
        logprobs = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
        assert logprobs == choice["logprobs"]["token_logprobs"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_a_prompt_is_scored_by_echo_alone(client):
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    [choice] = client.post("/v1/completions", body)["choices"]
    first, *values = choice["logprobs"]["token_logprobs"]
    assert first is None and len(values) == 2 and choice["logprobs"]["top_logprobs"][0] is None
    [scored] = asyncio.run(client.app.served.engine.score([PROMPT[:1]], [PROMPT[1:]]))
    assert np.array(values, np.float32).tobytes() == np.asarray(scored, np.float32).tobytes()


def test_log_probs_of_the_prompt_have_vllms_shape(client):
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2}
    [choice] = client.post("/v1/completions", body)["choices"]
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    for token_id, row in zip(PROMPT[1:], rows, strict=True):
        assert next(iter(row)) == str(token_id) and len(row) in (2, 3)
        assert all(set(each) == {"logprob", "rank", "decoded_token"} for each in row.values())


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"promt": "x"}, "Unknown field 'promt'. Did you mean 'prompt'?"),
        ({"prompt": 3}, "prompt=3 is not allowed: must be a string or an array."),
        ({}, "/v1/completions: prompt is missing."),
        ({"prompt": "x", "stream_options": 3}, "stream_options=3 is not allowed: must be an object or null."),
        ({"prompt": ""}, "prompt='' is not allowed"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1.0 is not allowed"),
        ({"prompt": "x", "guided_json": {"type": "a"}}, "must be a grammar that can be compiled. Invalid type: a"),
        ({"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, "one of them alone"),
        ({"prompt": "x", "guided_grammar": "root ::= ("}, "this EBNF cannot be translated"),
        ({"prompt": "x", "structured_outputs": {"regx": "a"}}, "Did you mean 'regex'?"),
        ({"prompt": "x", "guided_decoding_backend": "xgrammar"}, "guided_decoding_backend='xgrammar' is not served"),
        ({"prompt": "x", "max_tokens": 10_000}, "max_tokens"),
        ({"prompt": "x", "speculation": "no"}, "speculation='no' is not allowed: must be a bool, not str"),
        ({"prompt": [1, 2, 100_000]}, "100000"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(client, fields, said):
    assert said in client.problem("/v1/completions", fields)["message"]


@pytest.mark.parametrize("prompt, place", [([5, 10**9], "prompt_token_ids[1]"), ([[5], [10**9]], "prompts[1]: ")])
def test_only_prompts_of_several_are_named_by_their_index(client, prompt, place):
    problem = client.problem("/v1/completions", {"prompt": prompt})
    assert problem["message"].startswith(place) and problem["param"].startswith("prompt_token_ids[")


def test_fields_that_ask_for_nothing_are_taken(client):
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "best_of": 1, "suffix": None, "use_beam_search": False}
    assert len(client.post("/v1/completions", body)["choices"]) == 1


def test_another_model_is_not_here(client):
    assert "'other'" in client.problem("/v1/completions", {"prompt": "x", "model": "other"}, status=404)["message"]


@pytest.mark.parametrize("asked", [0, 1, 100])
def test_a_prompt_token_has_its_rank_among_the_whole_vocabulary(client, asked):
    def rows(prompt_logprobs):
        body = {"prompt": [5, 250, 7], "max_tokens": 1, "prompt_logprobs": prompt_logprobs}
        return client.post("/v1/completions", body)["choices"][0]["prompt_logprobs"][1:]

    for token_id, row, whole in zip(("250", "7"), rows(asked), rows(-1), strict=True):
        likelier = sum(each["logprob"] > whole[token_id]["logprob"] for each in whole.values())
        assert row[token_id] == whole[token_id] and whole[token_id]["rank"] == likelier + 1 > 1
        assert sorted(each["rank"] for each in row.values()) == sorted({*range(1, asked + 1), likelier + 1})
        assert sorted(each["rank"] for each in whole.values()) == [*range(1, len(whole) + 1)]


def test_without_likely_tokens_each_position_has_its_own(policy):
    client = Client(App(policy, ServeOptions(return_tokens_as_token_ids=True)))
    body = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 0, "return_token_ids": True}
    [choice] = client.post("/v1/completions", body)["choices"]
    found, names = choice["logprobs"], [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert found["tokens"] == names
    assert found["top_logprobs"] == [{k: v} for k, v in zip(names, found["token_logprobs"], strict=True)]


def test_minus_one_as_a_seed_asks_for_another_one_each_time(client):
    bodies = {
        "/v1/completions": {"prompt": "x", "seed": -1, "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "seed": -1, "max_tokens": 1},
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"seed": -1, "max_tokens": 1}},
    }
    seeds = [client.post(path, body)["choices"][0]["seed"] for path, body in bodies.items() for _ in range(2)]
    sampling = {"sampling_seed": -1, "max_new_tokens": 1}
    seeds += [client.post("/generate", {"text": "x", "sampling_params": sampling})["meta_info"]["seed"]]
    assert len(set(seeds)) == 7 and 2**64 - 1 not in seeds
    again = {"prompt": "x", "seed": 2**64 - 1, "max_tokens": 1}
    assert client.post("/v1/completions", again)["choices"][0]["seed"] == 2**64 - 1


@pytest.mark.parametrize("prompt", ["naïve 日本 is", [5, 6, 231, 152, 172, 7]])
def test_offsets_are_the_places_of_tokens_in_the_text(client, prompt):
    body = {"prompt": prompt, "max_tokens": 20, "echo": True, "logprobs": 0, "seed": 5, "return_token_ids": True}
    [choice] = client.post("/v1/completions", body)["choices"]
    codec, ids = client.app.served.codec, choice["prompt_token_ids"] + choice["token_ids"]
    places = choice["logprobs"]["text_offset"]
    assert len(places) == len(ids)
    for token_id, place in zip(ids, places, strict=True):
        if codec.bytes_of(token_id).isascii() and token_id not in codec.hf.all_special_ids:
            assert choice["text"][place] == codec.decode([token_id])


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_a_stream_are_those_of_the_whole(client, echo):
    body = {"prompt": ["日本", "b"], "max_tokens": 9, "n": 2, "logprobs": 0, "seed": 3, "echo": echo}
    whole = client.post("/v1/completions", body)["choices"]
    events = client.events("/v1/completions", body)
    for choice in whole:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        streamed = sum((part["logprobs"]["text_offset"] for part in parts), [])
        assert streamed == choice["logprobs"]["text_offset"]


def test_a_token_before_the_prompt_has_no_place_in_its_text(client, monkeypatch):
    codec = client.app.served.codec
    encode = codec._encode
    monkeypatch.setattr(codec, "_encode", lambda text, **options: [1, *encode(text, **options)])  # <bos>
    body = {"prompt": "sky", "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = client.post("/v1/completions", body)["choices"]
    assert choice["text"] == "sky" and choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_usage_stands_in_every_event_that_is_asked_for_it(client, path):
    prompt = {
        "/v1/completions": {"prompt": "x", "max_tokens": 4, "ignore_eos": True},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "ignore_eos": True},
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 4, "ignore_eos": True}},
    }[path]
    asks = {"include_usage": True, "continuous_usage_stats": True}
    events = client.events(path, {**prompt, "stream_options": asks})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [4, 4]
    events = client.events(path, {**prompt, "stream_options": {"include_usage": True}})
    assert [event.get("usage") is not None for event in events] == [False] * (len(events) - 1) + [True]
    wrong = client.problem(path, {**prompt, "stream": True, "stream_options": {"include_usag": True}})
    assert "include_usag" in wrong["message"]


CHOICE = {"structured_outputs": {"choice": ["abc"]}, "seed": 1}


@pytest.mark.parametrize(
    "fields, finish_reason, matched",
    [
        (CHOICE | {"max_tokens": 8}, "stop", "the end token"),
        (CHOICE | {"max_tokens": 8, "stop": ["b"]}, "stop", "b"),
        (CHOICE | {"max_tokens": 2}, "length", None),
    ],
)
@pytest.mark.parametrize(
    "path, prompt",
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_sglangs_clients_read_what_ended_an_answer_and_which_weights_made_it(
    client, path, prompt, fields, finish_reason, matched
):
    body = prompt | fields | {"return_token_ids": True}
    answer = client.post(path, body)
    [choice] = answer["choices"]
    matched = choice["token_ids"][-1] if matched == "the end token" else matched
    assert (choice["finish_reason"], choice["matched_stop"]) == (finish_reason, matched)
    assert answer["metadata"] == {"weight_version": str(answer["weight_version"])}
    events = client.events(path, body)
    *others, last = [each for event in events for each in event["choices"]]
    assert (last["finish_reason"], last["matched_stop"]) == (finish_reason, matched)
    assert not any(each["matched_stop"] for each in others)


def test_a_prompt_is_cut_at_the_end_that_the_body_names(client):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True}
    for side, kept in (("left", [6, 7, 8]), ("right", [5, 6, 7]), (None, [6, 7, 8])):
        (choice,) = client.post("/v1/completions", body | {"truncation_side": side})["choices"]
        assert choice["prompt_token_ids"] == kept
