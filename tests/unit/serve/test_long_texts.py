"""Long texts of one client, and the others, who do not wait for them."""

import threading

import pytest

from rollout_engine.serve import prompt_bounds
from rollout_engine.text.tokenizer import TextCodec

LONG = "many words " * 100_000
MESSAGES = [{"role": "user", "content": LONG}]
TURNS = {"messages": [MESSAGES[0], {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["short", LONG]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/generate", {"text": LONG}),
        ("/v1/embeddings", {"input": LONG}),
    ],
)
def test_a_text_that_cannot_be_short_enough_is_refused_by_its_characters(client, monkeypatch, path, body):
    encoded = []
    encode = TextCodec._long_texts_of(client.app.served.codec, client.app.served.codec._backend).encode
    monkeypatch.setattr(
        client.app.served.codec._long_texts, "encode", lambda *given: encoded.append(1) or encode(*given)
    )
    problem = client.problem(path, body)
    assert "max_model_len=256" in problem["message"] and "characters" in problem["message"] and not encoded


def test_a_long_text_that_is_to_be_truncated_is_encoded(client):
    body = {"prompt": LONG, "truncate_prompt_tokens": 8, "max_tokens": 1, "return_token_ids": True}
    [choice] = client.post("/v1/completions", body)["choices"]
    assert choice["prompt_token_ids"] == client.app.served.codec.encode("y words ")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["many words"] * 1000, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {**TURNS, "required_prefix_token_ids": [5, 6, 7]}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": MESSAGES}),
    ],
)
def test_other_requests_are_answered_while_a_long_text_is_encoded(client, monkeypatch, path, body):
    codec = client.app.served.codec
    encode, has_come, may_go = codec._encode, threading.Event(), threading.Event()

    def encode_slowly(text, **options):
        if "many words" in text or "Something" in text or "An answer" in text:
            has_come.set()
            assert may_go.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(codec, "_encode", encode_slowly)
    thread = threading.Thread(target=client.send, args=("POST", path, body))
    thread.start()
    try:
        assert has_come.wait(60)
        assert client.send("GET", "/health").status_code == 200
        client.post("/v1/completions", {"prompt": "short", "max_tokens": 1})
    finally:
        may_go.set()
        thread.join()


def test_more_characters_than_are_encoded_for_one_request_are_refused(client, monkeypatch):
    monkeypatch.setattr(prompt_bounds, "_TEXT_CHARS", 100)
    monkeypatch.setattr(prompt_bounds, "_CHARS_PER_TOKEN", 0)
    parts = [{"role": "user", "content": [{"type": "text", "text": "x" * 101}]}]
    for path, body in (
        ("/tokenize", {"prompt": "x" * 101}),
        ("/tokenize", {"messages": parts}),
        ("/v1/completions", {"prompt": "x" * 101, "truncate_prompt_tokens": 4}),
    ):
        assert "at most 100 characters" in client.problem(path, body)["message"]
    client.post("/tokenize", {"prompt": "x" * 100})
