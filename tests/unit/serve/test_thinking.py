"""Budgets of thinking over HTTP, under our name and those of others."""

import pytest

PROMPT = "ask <think>"
SAMPLING = {"max_tokens": 14, "ignore_eos": True}


def forced(place):
    return [4 <= index < 12 for index in range(place)]


@pytest.mark.parametrize(
    "field", [{"thinking_budget": 4}, {"thinking_token_budget": 4}, {"custom_params": {"thinking_budget": 4}}]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_routes_force_the_end(client, path, field):
    prompt = {"prompt": PROMPT} if "chat" not in path else {"messages": [{"role": "user", "content": "<think>"}]}
    body = {**prompt, **SAMPLING, **field, "seed": 1, "return_token_ids": True}
    [choice] = client.post(path, body)["choices"]
    assert choice["forced"] == forced(14)
    parts = [part for event in client.events(path, body) for part in event["choices"]]
    assert sum((part["forced"] for part in parts), []) == forced(14)
    [free] = client.post(path, {**body, **dict.fromkeys(field)})["choices"]
    assert "forced" not in free and free["token_ids"][:4] == choice["token_ids"][:4]


def test_routes_of_token_ids_do_so_too(client, policy):
    ids = policy.tokenizer.encode(PROMPT)
    for name in ("thinking_budget", "thinking_token_budget"):
        sampling = {**SAMPLING, name: 4, "seed": 1, "logprobs": 0}
        [choice] = client.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})["choices"]
        assert choice["forced"] == forced(14)
    settings = {"max_new_tokens": 14, "ignore_eos": True, "sampling_seed": 1}
    for body in (
        {"sampling_params": {**settings, "custom_params": {"thinking_budget": 4}}},
        {"sampling_params": settings, "max_thinking_tokens": 4},
        {"sampling_params": {**settings, "thinking_budget": 4}, "max_thinking_tokens": 4},
    ):
        answer = client.post("/generate", {"input_ids": ids, **body})
        assert (answer["forced"], answer["output_ids"]) == (forced(14), choice["token_ids"])


def test_minus_one_asks_for_nothing(client):
    [choice] = client.post("/v1/completions", {"prompt": PROMPT, **SAMPLING, "thinking_token_budget": -1})["choices"]
    assert "forced" not in choice


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_token_budget": "4"}, "thinking_budget"),
        ({"thinking_token_budget": 4, "thinking_budget": 5}, "thinking_token_budget"),
        ({"custom_params": {"thinking_budget": 4, "token_id": 7}}, "custom_params"),
        ({"custom_params": [4]}, "custom_params"),
        ({"thinking_budget": 4, "thinking_end": ""}, "thinking_end"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, fields, field):
    problem = client.problem("/v1/completions", {"prompt": "x", **fields})
    assert problem["param"] == field


def test_two_budgets_of_one_prompt_have_to_agree(client):
    body = {"text": "x", "sampling_params": {"thinking_budget": 5}, "max_thinking_tokens": 4}
    assert client.problem("/generate", body)["param"] == "max_thinking_tokens"
