"""Teachers over HTTP: the requests of vLLM's, SGLang's, TRL's and verl's clients, and scores with the engine's bits."""

import asyncio
import base64
import io
import json

import numpy as np
import pytest

from envs_adapters.trainers import verl_teacher

PATH = "/inference/v1/generate"
PROMPT, COMPLETION = [5, 6, 7], [9, 8, 12, 9]
TOKENS = PROMPT + COMPLETION


def scores(client, candidates, **options):
    """[len(COMPLETION), K] by the engine itself."""
    pair = [PROMPT], [COMPLETION]
    found = asyncio.run(client.app.served.engine.score_candidates(*pair, np.array(candidates), **options))
    return found.candidates


def matrix(answer):
    return np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])), allow_pickle=False)


def scored(client, ids, start=2, **params):
    given = {"max_tokens": 1, "prompt_logprob_token_ids": ids, "prompt_logprob_start": start} | params
    return client.post(PATH, {"model": "tiny", "token_ids": TOKENS, "sampling_params": given})


def test_one_set_of_ids_is_scored_at_every_place(client):
    answer = scored(client, [3, 9, 250])
    assert np.array_equal(matrix(answer), scores(client, [[3, 9, 250]] * 4))
    assert len(answer["choices"][0]["token_ids"]) == 1
    first = scored(client, [3, 9], start=0)
    assert matrix(first).shape == (6, 2) and np.array_equal(matrix(first)[2:], scores(client, [[3, 9]] * 4))
    assert matrix(scored(client, [3], start=6)).shape == (0, 1)


def test_each_place_has_ids_of_its_own(client):
    ids = [[token, token + 1] for token in COMPLETION]
    answer = scored(client, ids, temperature=0.5, prompt_logprobs=2)
    found = matrix(answer)
    assert found.dtype == np.float32 and np.array_equal(found, scores(client, ids, temperature=0.5))
    rows = answer["prompt_logprobs"][len(PROMPT) :]
    own = [row[str(token)]["logprob"] for row, token in zip(rows, COMPLETION, strict=True)]
    assert np.array_equal(found[:, 0], np.array(own, np.float32))


def test_raw_log_probs_are_of_temperature_one(client):
    answer = scored(client, [3, 4], temperature=0.5, logprobs_mode="raw")
    assert np.array_equal(matrix(answer), scores(client, [[3, 4]] * 4))


@pytest.mark.parametrize(
    "params, words",
    [
        (dict(prompt_logprob_token_ids=[[1], [2]]), "each of the 4 prompt tokens"),
        (dict(prompt_logprob_token_ids=[[1]] * 3 + [[1, 2]]), "each of the 4 prompt tokens"),
        (dict(prompt_logprob_token_ids=[]), "prompt_logprob_token_ids"),
        (dict(prompt_logprob_token_ids=["a"]), "prompt_logprob_token_ids"),
        (dict(prompt_logprob_token_ids=[True]), "prompt_logprob_token_ids"),
        (dict(prompt_logprob_token_ids=[259]), r"in \[0, 259\)"),
        (dict(prompt_logprob_token_ids=[-1]), r"in \[0, 259\)"),
        (dict(prompt_logprob_token_ids=[3], prompt_logprob_start=-1), "prompt_logprob_start"),
        (dict(prompt_logprob_token_ids=None, prompt_logprob_start=2), "prompt_logprob_start"),
        (dict(prompt_logprob_token_ids=[3], truncate_prompt_tokens=2), "truncate_prompt_tokens"),
    ],
)
def test_wrong_ids_are_refused_by_name(client, params, words):
    import re

    given = {"max_tokens": 1, "prompt_logprob_start": 2} | params
    problem = client.problem(PATH, {"token_ids": TOKENS, "sampling_params": given})
    assert re.search(words, problem["message"]), problem


def test_fields_next_to_the_sampling_parameters_are_sent_inside(client):
    problem = client.problem(PATH, {"token_ids": TOKENS, "prompt_logprob_token_ids": [3]})
    assert "prompt_logprob_token_ids is a sampling parameter: give it inside 'sampling_params'" in problem["message"]


def test_a_stream_has_no_scores(client):
    given = {"max_tokens": 1, "prompt_logprob_token_ids": [3]}
    problem = client.problem(PATH, {"token_ids": TOKENS, "sampling_params": given, "stream": True})
    assert "stream" in problem["message"]


@pytest.mark.parametrize("start", [0, 1, 3, 7])
def test_sglangs_clients_get_ids_at_the_prompts_places(client, start):
    body = {
        "input_ids": TOKENS,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
        "token_ids_logprob": [3, 9],
    }
    meta = client.post("/generate", body)["meta_info"]
    rows = meta["input_token_ids_logprobs"]
    assert len(rows) == len(TOKENS) - start == len(meta["input_token_logprobs"])
    assert (rows[0] is None) == (start == 0) if rows else True
    found = [[[value, token] for value, token, _ in row] for row in rows if row is not None]
    expected = scores(client, [[3, 9]] * 4).tolist()
    assert (
        found[len(found) - 4 :][: len(found)]
        == [[[value, token] for value, token in zip(row, (3, 9), strict=True)] for row in expected][
            max(0, 4 - len(found)) :
        ]
    )


def test_sglangs_streams_and_batches_have_the_same(client):
    body = {
        "input_ids": [TOKENS, TOKENS[:5]],
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": [3, -1],
        "token_ids_logprob": [[3, 9], [4]],
    }
    first, second = (each["meta_info"] for each in client.post("/generate", body))
    assert len(first["input_token_ids_logprobs"]) == 4 and "input_token_ids_logprobs" not in second
    one = {name: value[0] if isinstance(value, list) else value for name, value in body.items()}
    *_, last = client.events("/generate", one)
    assert last["meta_info"]["input_token_ids_logprobs"] == first["input_token_ids_logprobs"]


def test_trls_clients_read_their_teachers(client):
    """The requests of `trl.generation.vllm_client.VLLMClient.get_sequence_logprobs` and of async distillation."""
    other = [5, 6, 30, 31]
    for prompt in ([TOKENS, other], TOKENS):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 3}
        choices = client.post("/v1/completions", body)["choices"]
        sequences = [TOKENS, other] if prompt is not TOKENS else [TOKENS]
        assert len(choices) == len(sequences)
        for choice, sequence in zip(choices, sequences, strict=True):
            assert len(choice["prompt_logprobs"]) == len(sequence) and choice["prompt_logprobs"][0] is None
            for token, row in list(zip(sequence, choice["prompt_logprobs"], strict=True))[1:]:
                ranked = sorted(row.items(), key=lambda item: item[1]["rank"])
                assert [item["rank"] for _, item in ranked][:3] == [1, 2, 3] and str(token) in row
    rows = choices[0]["prompt_logprobs"][len(PROMPT) :]
    own = [row[str(token)]["logprob"] for row, token in zip(rows, COMPLETION, strict=True)]
    assert np.array_equal(np.array(own, np.float32), scores(client, [[token] for token in COMPLETION])[:, 0])


@pytest.mark.parametrize("num_top", [0, 2])
def test_verls_teachers_get_rows_of_their_prompts(client, num_top):
    """verl's `AsyncTeacherLLMServerManager` asks for one token and `prompt_logprobs`, and asserts a row per token."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": num_top}
    assert verl_teacher.is_scoring(params) and not verl_teacher.is_scoring({"max_tokens": 1, "prompt_logprobs": None})
    answer = client.post(PATH, verl_teacher.scoring_body(TOKENS, params, "request-1"))
    fields = verl_teacher.scored_fields(answer, TOKENS, params)
    assert len(fields["prompt_ids"]) == len(fields["prompt_logprobs"]) == len(TOKENS)
    assert fields["prompt_ids"][-1] == [0] * max(1, num_top) and fields["prompt_logprobs"][-1] == [0.0] * max(
        1, num_top
    )
    own = np.array(fields["sampled_prompt_logprobs"][len(PROMPT) - 1 : -1], np.float32)
    assert np.array_equal(own, scores(client, [[token] for token in COMPLETION]))
    if num_top == 0:
        assert fields["prompt_ids"][:-1] == [[token] for token in TOKENS[1:]]
    else:
        assert all(first > second for first, second in fields["prompt_logprobs"][:-1])


def test_verls_teachers_get_the_students_tokens(client):
    """verl's reverse_kl_topk: the union of the student's tokens as one set, from the last token of the prompt on."""
    ids = [9, 3, 4, 12]
    params = {"max_tokens": 1, "temperature": 1.0}
    params |= {"prompt_logprob_token_ids": ids, "prompt_logprob_start": len(PROMPT) - 1}
    body = json.loads(json.dumps(verl_teacher.scoring_body(TOKENS, params, "r")))
    found = verl_teacher.scored_fields(client.post(PATH, body), TOKENS, params)["prompt_token_id_logprobs"]
    assert found["token_ids"] == ids
    assert np.array_equal(np.array(found["logprobs"], np.float32), scores(client, [ids] * 4))


def test_trls_clients_of_its_own_server_read_their_teachers(client):
    """The requests of the same client to `trl vllm-serve`."""
    body = {
        "sequences": [TOKENS, [5, 6, 30], [5, 6]],
        "prompt_lengths": [3, 1, 2],
        "top_logprobs": 2,
        "temperature": 0.5,
    }
    lists = client.post("/get_sequence_logprobs/", body)
    assert [len(rows) for rows in lists["logprobs"]] == [4, 2, 0]
    own = []
    for token, ids, values in zip(COMPLETION, lists["logprob_token_ids"][0], lists["logprobs"][0], strict=True):
        assert len(ids) == len(values) == (2 if token in ids[:2] else 3) and values == sorted(values, reverse=True)
        own.append(values[ids.index(token)])
    expected = scores(client, [[token] for token in COMPLETION], temperature=0.5)[:, 0]
    assert np.array_equal(np.array(own, np.float32), expected)

    arrays = client.post("/get_sequence_logprobs/", body | {"response_format": "binary"})
    assert arrays["shape"] == [3, 4, 2] and arrays["completion_lengths"] == [4, 2, 0]

    def array(name, dtype, width):
        return np.frombuffer(base64.b64decode(arrays[name]), dtype).reshape(3, 4, width)

    assert np.array_equal(array("actual_logprobs_b64", np.float32, 1)[0, :, 0], expected)
    assert array("actual_token_ids_b64", np.int32, 1)[0, :, 0].tolist() == COMPLETION
    assert array("token_ids_b64", np.int32, 2)[0].tolist() == [ids[:2] for ids in lists["logprob_token_ids"][0]]
    assert (array("logprobs_b64", np.float32, 2)[2] == -np.inf).all()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(prompt_lengths=[3]), "prompt_lengths"),
        (dict(prompt_lengths=[3, 0]), r"prompt_lengths[1]"),
        (dict(prompt_lengths=[3, 4]), r"prompt_lengths[1]"),
        (dict(top_logprobs=0), "top_logprobs"),
        (dict(temperature=-1), "temperature"),
        (dict(response_format="text"), "response_format"),
    ],
)
def test_wrong_requests_of_trls_clients_are_refused(client, changes, words):
    body = {"sequences": [TOKENS, [5, 6, 30]], "prompt_lengths": [3, 1]} | changes
    assert words in client.problem("/get_sequence_logprobs", body)["message"]
