"""TRL's own client of vLLM's server on ours: the paths of its data."""

import pytest

for package in ("trl", "requests", "uvicorn"):
    pytest.importorskip(package)

import numpy as np  # noqa: E402
from trl.generation import vllm_client  # noqa: E402

from rollout_engine import RolloutPolicy  # noqa: E402
from rollout_engine.serve.options import ServeOptions  # noqa: E402
from rollout_engine.serve.server import HttpServer  # noqa: E402
from rollout_engine.testing import tiny_checkpoint  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32") as made:
        yield made


@pytest.fixture
def client(policy, monkeypatch):
    """It only asks whether vLLM is installed."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_: True)
    with HttpServer(policy, ServeOptions(port=0)) as server:
        yield vllm_client.VLLMClient(base_url=server.url)


def test_completions_have_their_ids_and_log_probs(policy, client):
    made = client.generate(PROMPTS, n=2, max_tokens=5, logprobs=0, generation_kwargs={"seed": 3})
    assert made["prompt_ids"] == PROMPTS and [len(ids) for ids in made["completion_ids"]] == [5] * 4
    for index, (ids, logprobs) in enumerate(zip(made["completion_ids"], made["logprobs"], strict=True)):
        [scored] = policy.engine.score([PROMPTS[index // 2]], [ids])
        assert np.array([each[0] for each in logprobs], np.float32).tobytes() == np.asarray(scored).tobytes()
    assert [[i for [i] in ids] for ids in made["logprob_token_ids"]] == made["completion_ids"]


def test_conversations_are_answered(client):
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "again")]
    made = client.chat(conversations, n=2, max_tokens=4, logprobs=0)
    assert [len(ids) for ids in made["completion_ids"]] == [4] * 4 == [len(each) for each in made["logprobs"]]
    assert len(made["prompt_ids"]) == 2


@pytest.mark.parametrize("top", [2, 64])
def test_sequences_are_scored(policy, client, top):
    made = client.get_sequence_logprobs([[5, 6, 7, 8]], [2], top_logprobs=top)
    [scored] = policy.engine.score([[5, 6]], [[7, 8]])
    [actual] = made["actual_logprobs"]
    assert np.array([each[0] for each in actual], np.float32).tobytes() == np.asarray(scored).tobytes()
    assert np.shape(made["logprobs"]) == (1, 2, top)


def test_what_it_asks_of_a_server_is_answered(client):
    assert client.get_world_size() == 1
    info = client.get_server_info()
    assert info["weight_transfer_config"] is not None and info["model_config"]["dtype"] == "float32"
    client.reset_prefix_cache()
