"""Supports over HTTP, as clients of vLLM's route read them: `sampling_mask` of a choice."""

import pytest

PROMPT = list(range(5, 12))
PATH = "/inference/v1/generate"


def body(*, seed=3, **sampling):
    sampling = {"max_tokens": 6, "seed": seed, "logprobs": 0, "ignore_eos": True} | sampling
    return {"token_ids": PROMPT, "return_sampling_mask": True, "sampling_params": sampling}


def test_each_token_has_the_ids_it_was_drawn_from(client):
    for choice in client.post(PATH, body(n=2, top_k=4, top_p=0.9))["choices"]:
        assert len(choice["sampling_mask"]) == 6
        for token_id, ids in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
            assert token_id in ids and 1 <= len(ids) <= 4 and ids == sorted(ids)


def test_tokens_of_the_whole_vocabulary_have_an_empty_row(client):
    [choice] = client.post(PATH, body())["choices"]
    assert choice["sampling_mask"] == [[]] * 6


def test_events_of_a_stream_carry_the_rows_of_their_own_tokens(client):
    whole = client.post(PATH, body(top_k=4))["choices"][0]
    events = client.events(PATH, {**body(top_k=4), "stream": True})
    choices = [choice for event in events for choice in event["choices"]]
    assert [ids for choice in choices for ids in choice["sampling_mask"]] == whole["sampling_mask"]
    assert all(len(choice["sampling_mask"]) == len(choice["token_ids"]) for choice in choices)


def test_nothing_comes_unasked(client):
    asked = body(top_k=4)
    del asked["return_sampling_mask"]
    assert "sampling_mask" not in client.post(PATH, asked)["choices"][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_routes_that_cannot_return_them_refuse_to(client, path):
    asked = {"prompt": PROMPT, "text": "a", "return_sampling_mask": True}
    asked = {name: asked[name] for name in ("return_sampling_mask", "text" if path == "/generate" else "prompt")}
    assert "return_sampling_mask" in client.problem(path, asked)["message"]
