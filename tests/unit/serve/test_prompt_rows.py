"""Log-probs of prompts as vLLM's clients read them, on every route and in streams."""

import asyncio
import json
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from rollout_engine.base.outputs import RequestOutput, TokenTexts
from rollout_engine.serve.openai import prompt_rows as written
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.testing import byte_tokenizer

PROMPT = [5, 250, 7]


def output_of(token_ids, logprobs, top, ranks):
    unset = dict.fromkeys(RequestOutput.__struct_fields__)
    fields = {"prompt_token_ids": token_ids, "prompt_logprobs": logprobs, "prompt_top_logprobs": top}
    return RequestOutput(**(unset | fields | {"prompt_ranks": ranks}))


def random_output(count, width):
    random = np.random.default_rng(0)
    ids = np.array([random.permutation(259)[:width] for _ in range(count)], np.int32)
    values = -np.sort(random.exponential(size=(count, width)).astype(np.float32), axis=1)
    own = random.integers(0, 259, count)
    return output_of(own.tolist(), values[:, 0].copy(), (ids, values), np.arange(count, dtype=np.int32))


def read(output, tokenizer=None):
    rows = asyncio.run(prompt_rows(SimpleNamespace(token_texts=TokenTexts(tokenizer)), output))
    return None if rows is None else json.loads(msgspec.json.encode(rows))


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()], ids=["ids", "texts"])
def test_they_are_the_dicts_of_the_output_to_the_bit_and_in_their_order(tokenizer):
    output = random_output(40, 30)
    first, *rows = read(output, tokenizer)
    assert first is None
    for row, expected in zip(rows, output.prompt_logprob_dicts(tokenizer)[1:], strict=True):
        assert list(row) == [str(token_id) for token_id in expected]
        made = [(np.float32(each["logprob"]), each["rank"], each["decoded_token"]) for each in row.values()]
        assert made == [(np.float32(each.logprob), each.rank, each.decoded_token) for each in expected.values()]


def test_what_json_cannot_say_is_written_as_others_do():
    values = np.float32([np.nan, -np.inf, np.nan, -1e-30])
    top = np.array([[-1], [3], [4], [9]], np.int32), np.float32([[np.nan], [-0.5], [-np.inf], [-1e-30]])
    rows = read(output_of([7, 8, 8, 9], values, top, np.array([0, 30, 1, 1], np.int32)))
    assert rows[1]["8"] == {"logprob": -9999.0, "rank": 30, "decoded_token": None}
    assert rows[2]["8"]["logprob"] is None and rows[2]["4"]["logprob"] == -9999.0
    assert list(rows[3]) == ["9"] and np.float32(rows[3]["9"]["logprob"]) == np.float32(-1e-30)


def test_a_prompt_of_one_token_has_none_and_no_log_probs_no_rows():
    assert read(output_of([7], np.float32([np.nan]), None, np.zeros(1, np.int32))) == [None]
    assert read(output_of([7], None, None, None)) is None


@pytest.mark.parametrize("count, beside", [(4, False), (900, True)])
def test_many_are_written_beside_the_event_loop(monkeypatch, count, beside):
    threads, write = [], written._encode_rows
    monkeypatch.setattr(
        written, "_encode_rows", lambda *each: threads.append(threading.current_thread()) or write(*each)
    )
    assert len(read(random_output(count, 20))) == count
    assert [each is not threading.main_thread() for each in threads] == [beside]


@pytest.mark.parametrize(
    "path, prompt",
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/inference/v1/generate", {"token_ids": PROMPT}),
    ],
)
def test_a_streams_first_event_has_those_of_the_whole_response(client, path, prompt):
    settings = {"max_tokens": 32, "seed": 4, "n": 2, "prompt_logprobs": 3}
    body = prompt | ({"sampling_params": settings} if path.startswith("/inference") else settings)
    whole = client.post(path, body)
    holders = whole["choices"] if path == "/v1/completions" else [whole]
    told = [each["prompt_logprobs"] for each in holders]
    assert told[0][0] is None and len(told[0][1]) >= 3 and all(each == told[0] for each in told)
    events = client.events(path, body)
    streamed = [each for event in events for each in (event["choices"] if path == "/v1/completions" else [event])]
    found = [each["prompt_logprobs"] for each in streamed if each.get("prompt_logprobs")]
    assert found == told


@pytest.mark.parametrize("logprobs, widths", [(0, {1}), (1, {1, 2}), (-1, {259})])
def test_an_echo_shows_as_many_likely_tokens_as_it_was_asked_for(client, logprobs, widths):
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": logprobs, "prompt_logprobs": -1}
    body["return_tokens_as_token_ids"] = True
    [choice] = client.post("/v1/completions", body)["choices"]
    assert [len(row) for row in choice["prompt_logprobs"][1:]] == [259, 259]
    first, *rows = choice["logprobs"]["top_logprobs"]
    assert first is None and {len(row) for row in rows} <= widths
