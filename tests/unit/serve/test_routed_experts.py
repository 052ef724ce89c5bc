"""Routed experts over HTTP: those of the engine, in the shapes that clients of vLLM's and SGLang's routes read."""

import base64

import numpy as np
import pytest

from rollout_engine import RolloutPolicy, SamplingParams
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.architectures import SIZES
from tests.unit.serve.conftest import Client

PROMPT = list(range(5, 12))
VLLM = {"token_ids": PROMPT, "return_routed_experts": True, "sampling_params": {"max_tokens": 6, "seed": 3, "n": 2}}


@pytest.fixture(scope="module")
def routed_policy(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **SIZES["qwen3_moe"])
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=256) as made:
        yield made


@pytest.fixture(scope="module")
def mixture(routed_policy):
    return Client(App(routed_policy, ServeOptions(served_model_name="tiny")))


@pytest.fixture(scope="module")
def expected(routed_policy):
    """Routed experts of two samples of the prompt, int16 [12, 2, 2] each."""
    params = SamplingParams(max_tokens=6, seed=3, n=2, return_routed_experts=True, ignore_eos=True)
    return routed_policy.rollout([PROMPT], params, use_tqdm=False)["routed_experts"][:, :-1].numpy()


def decoded(fields):
    data = np.frombuffer(base64.b64decode(fields["data"]), fields["dtype"])
    return data.reshape(fields["shape"])


def test_vllms_route_gives_those_of_each_choice(mixture, expected):
    body = {**VLLM, "sampling_params": {**VLLM["sampling_params"], "ignore_eos": True}}
    choices = mixture.post("/inference/v1/generate", body)["choices"]
    for choice, rows in zip(choices, expected, strict=True):
        assert (choice["routed_experts"]["dtype"], choice["routed_experts"]["start"]) == ("uint8", 0)
        assert np.array_equal(decoded(choice["routed_experts"]), rows)


def test_events_of_a_stream_carry_what_is_new_and_where_it_starts(mixture, expected):
    body = {**VLLM, "sampling_params": {**VLLM["sampling_params"], "ignore_eos": True}}
    events = mixture.events("/inference/v1/generate", body)
    for index, rows in enumerate(expected):
        parts = [c["routed_experts"] for event in events for c in event["choices"] if c["index"] == index]
        parts = [part for part in parts if part is not None and part["shape"][0]]
        assert [part["start"] for part in parts] == np.cumsum([0, *(p["shape"][0] for p in parts[:-1])]).tolist()
        assert np.array_equal(np.concatenate([decoded(part) for part in parts]), rows)


def test_sglangs_route_gives_int32_in_meta_info(mixture, expected):
    sampling = {"max_new_tokens": 6, "sampling_seed": 3, "n": 2, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True}
    for answer, rows in zip(mixture.post("/generate", body), expected, strict=True):
        found = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32).reshape(-1, 2, 2)
        assert answer["meta_info"]["routed_experts_shape"] == list(rows.shape)
        assert len(found) == answer["meta_info"]["prompt_tokens"] + answer["meta_info"]["completion_tokens"] - 1
        assert np.array_equal(found, rows)
    body["sampling_params"] = {"max_new_tokens": 0}
    found = np.frombuffer(base64.b64decode(mixture.post("/generate", body)["meta_info"]["routed_experts"]), np.int32)
    assert np.array_equal(found.reshape(-1, 2, 2), expected[0][: len(PROMPT) - 1])


def test_nothing_comes_unasked(mixture):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert "routed_experts" not in mixture.post("/inference/v1/generate", body)["choices"][0]
    answer = mixture.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})
    assert "routed_experts" not in answer["meta_info"]


@pytest.mark.parametrize("path, body", [("/inference/v1/generate", VLLM), ("/generate", {"input_ids": PROMPT})])
def test_a_dense_model_refuses_to_return_them(client, path, body):
    response = client.send("POST", path, {**body, "return_routed_experts": True})
    assert response.status_code == 400 and "no routers" in response.text
