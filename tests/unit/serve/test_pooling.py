"""Routes that pool: OpenAI's and vLLM's shapes, over the numbers of the engine itself."""

import base64
import re

import numpy as np
import openai
import pytest

from rollout_engine import LLM, LLMEngine, PoolingParams
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.testing import tiny_checkpoint
from tests.unit.serve.conftest import Client

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """(client, engine) of checkpoints with a head, by its number of labels."""
    made = {}
    for num_labels in (1, 3):
        path = tiny_checkpoint(tmp_path_factory.mktemp("head"), head="sequence", num_labels=num_labels)
        llm = LLM(path, log_stats=False)
        made[num_labels] = Client(App(llm, ServeOptions(served_model_name="tiny"))), llm
    yield made
    for _, llm in made.values():
        llm.shutdown()


def pooled(policy, prompts, **params):
    llm = LLM.from_engine(LLMEngine(policy.frontend))
    return [output.outputs.data for output in llm.encode(prompts, PoolingParams(**params), use_tqdm=False)]


def test_embeddings_are_the_engines_own_in_the_shape_of_openai(client, policy):
    found = client.post("/v1/embeddings", {"input": ["hello", "the quick"], "model": "tiny"})
    assert (found["object"], found["model"], found["weight_version"]) == ("list", "tiny", policy.policy_version)
    assert [(each["index"], each["object"]) for each in found["data"]] == [(0, "embedding"), (1, "embedding")]
    expected = pooled(policy, ["hello", "the quick"], kind="last", normalize=True)
    for each, vector in zip(found["data"], expected, strict=True):
        assert np.array_equal(np.float32(each["embedding"]), vector)
    usage = found["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 14 and usage["completion_tokens"] == 0


@pytest.mark.parametrize("given", ["hello", [5, 6, 7], ["hello"], [[5, 6, 7], [8]]])
def test_an_input_is_a_text_ids_or_a_list_of_either(client, policy, given):
    found = client.post("/v1/embeddings", {"input": given, "kind": "mean", "normalize": False})
    prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    expected = pooled(policy, prompts, kind="mean")
    assert [np.float32(each["embedding"]).tolist() for each in found["data"]] == [each.tolist() for each in expected]


def test_base64_has_the_same_bits(client):
    plain, packed = (
        client.post("/v1/embeddings", {"input": "hello", "encoding_format": each})["data"][0]["embedding"]
        for each in ("float", "base64")
    )
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.float32(plain))


def test_a_conversation_is_embedded_by_the_chat_template(client, policy):
    found = client.post("/v1/embeddings", {"messages": CHAT})
    (expected,) = pooled(policy, [CHAT], kind="last", normalize=True)
    assert np.array_equal(np.float32(found["data"][0]["embedding"]), expected)


def test_openais_own_client_reads_embeddings(policy):
    with HttpServer(policy, ServeOptions(port=0)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            found = client.embeddings.create(model="default", input=["hello"])
    (expected,) = pooled(policy, ["hello"], kind="last", normalize=True)
    assert np.array_equal(np.float32(found.data[0].embedding), expected)


@pytest.mark.parametrize(
    "body, params",
    [
        ({}, dict(kind="token")),
        ({"kind": "mean"}, dict(kind="mean")),
        ({"task": "embed"}, dict(kind="last", normalize=True)),
        ({"kind": "token", "step_token_ids": [6]}, dict(kind="token", step_token_ids=[6])),
        (
            {"truncate_prompt_tokens": 2, "truncation_side": "right"},
            dict(kind="token", truncate_prompt_tokens=2, truncation_side="right"),
        ),
    ],
)
def test_pooling_gives_any_kind(client, policy, body, params):
    found = client.post("/pooling", {"input": [5, 6, 7], **body})
    (expected,) = pooled(policy, [[5, 6, 7]], **params)
    assert found["data"][0]["object"] == "pooling"
    assert np.array_equal(np.float32(found["data"][0]["data"]), expected)


def test_classes_have_probabilities_that_sum_to_one(classifiers):
    client, llm = classifiers[3]
    found = client.post("/classify", {"input": ["hello", "there"]})
    logits = [output.outputs.data for output in llm.encode(["hello", "there"], {"kind": "classify"}, use_tqdm=False)]
    for each, own in zip(found["data"], logits, strict=True):
        powers = np.exp(own.astype(np.float64))
        assert each["probs"] == pytest.approx((powers / powers.sum()).tolist())
        assert each["label"] == f"LABEL_{own.argmax()}" and each["num_classes"] == 3
    raw = client.post("/classify", {"input": "hello", "use_activation": False})["data"][0]["probs"]
    assert np.array_equal(np.float32(raw), logits[0])


def test_scores_of_a_head_are_read_behind_both_texts(classifiers):
    client, llm = classifiers[1]
    found = client.post("/score", {"text_1": "ab", "text_2": ["c", "de"], "use_activation": False})
    rewards = [float(output.outputs.data[0]) for output in llm.reward(["abc", "abde"], use_tqdm=False)]
    assert [each["score"] for each in found["data"]] == rewards
    ranked = client.post("/rerank", {"query": "ab", "documents": ["c", "de"]})
    best = int(np.argmax(rewards))
    first, second = ranked["results"]
    assert (first["index"], first["document"]) == (best, {"text": ["c", "de"][best]})
    assert first["relevance_score"] == pytest.approx(1 / (1 + np.exp(-rewards[best])))
    assert first["relevance_score"] >= second["relevance_score"] and ranked["usage"]["total_tokens"] == 7


def test_scores_of_a_causal_lm_are_cosines(client):
    found = client.post("/v1/score", {"queries": "same", "documents": ["same", "other"]})
    same, other = (each["score"] for each in found["data"])
    assert same == pytest.approx(1.0) and other < same
    (best,) = client.post("/v1/rerank", {"query": "same", "documents": ["other", "same"], "top_n": 1})["results"]
    assert (best["index"], best["document"]["text"]) == (1, "same")


def test_models_tell_what_they_serve(client, classifiers):
    (model,) = client.send("GET", "/v1/models").json()["data"]
    assert model["tasks"] == ["generate", "last", "mean", "cls", "token"]
    (model,) = classifiers[1][0].send("GET", "/v1/models").json()["data"]
    assert model["tasks"] == ["last", "mean", "cls", "token", "classify", "reward"]


@pytest.mark.parametrize(
    "path, body, match",
    [
        ("/v1/embeddings", {}, "input=None is not allowed"),
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "dimensions=8 is not served. Leave it out"),
        ("/v1/embeddings", {"input": "x", "kind": "token"}, "Other kinds go to /pooling"),
        ("/v1/embeddings", {"input": [[5] * 300]}, "at most max_model_len=256 tokens"),
        (
            "/v1/embeddings",
            {"input": "x", "encoding_format": "hex"},
            "must be one of 'float', 'base64'",
        ),
        ("/pooling", {"input": "x", "kind": "tokens"}, "kind='tokens' is not allowed: must be 'last', 'mean', 'cls', "),
        ("/pooling", {"input": "x", "kind": "token", "step_token_ids": [999]}, "step_token_ids=999 is not allowed"),
        ("/pooling", {"input": "x", "task": "embedd"}, "task='embedd' is not allowed"),
        ("/classify", {"input": "x"}, r"no classification head \(no score.weight\)"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "one text, or 3"),
        ("/rerank", {"query": "a", "documents": []}, "documents="),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n=-1"),
    ],
)
def test_what_cannot_be_pooled_is_a_bad_request(client, path, body, match):
    problem = client.problem(path, body)
    assert problem["type"] == "BadRequestError"
    assert re.search(match, problem["message"])


LONG = "a" * 5000


@pytest.mark.parametrize(
    "path, body, place",
    [
        ("/pooling", {"input": ["a", ""]}, "input[1]: prompt=[]"),
        ("/v1/embeddings", {"input": [[5], [5, 99999]]}, "input[1]: prompt_token_ids[1]=99999"),
        ("/rerank", {"query": "x", "documents": ["a", LONG]}, "documents[1]: prompt='5000 characters'"),
        ("/rerank", {"query": LONG, "documents": ["a", "b"]}, "query: prompt='5000 characters'"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", LONG]}, "text_2[1]: prompt='5000 characters'"),
        ("/score", {"queries": "a", "documents": ["c", LONG]}, "documents[1]: prompt='5000 characters'"),
    ],
)
def test_errors_of_a_prompt_name_its_place_in_the_body(client, path, body, place):
    assert client.problem(path, body)["message"].startswith(place)


def test_errors_of_a_pair_name_both_of_its_texts(classifiers):
    client, _ = classifiers[1]
    message = client.problem("/rerank", {"query": "x", "documents": ["a", LONG]})["message"]
    assert message.startswith("query and documents[1]: prompt='5001 tokens'")
    message = client.problem("/score", {"text_1": ["a", "b"], "text_2": ["c", LONG]})["message"]
    assert message.startswith("text_1[1] and text_2[1]: prompt='5001 tokens'")


def test_a_classifier_does_not_complete(classifiers):
    client, _ = classifiers[3]
    problem = client.problem("/v1/completions", {"prompt": "x"})
    assert "This model cannot generate" in problem["message"] and "/pooling or /classify" in problem["message"]
    assert "does not give one score" in client.problem("/score", {"text_1": "a", "text_2": "b"})["message"]
