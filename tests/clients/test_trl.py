"""TRL's `VLLMClient`: what it does without CUDA. Its weight sync needs NCCL and is not asked for here."""

import pytest

pytest.importorskip("trl")

from trl.generation import vllm_client  # noqa: E402

CLIENT = "trl"
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
MESSAGES = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(url, monkeypatch):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)  # only weight sync imports vLLM
    return vllm_client.VLLMClient(base_url=url)


def check_scores(answer, score, temperature, n):
    assert len(answer["completion_ids"]) == len(answer["prompt_ids"]) * n
    for index, (token_ids, ids, logprobs) in enumerate(
        zip(answer["completion_ids"], answer["logprob_token_ids"], answer["logprobs"], strict=True)
    ):
        sampled = [dict(zip(*row, strict=True))[token] for token, *row in zip(token_ids, ids, logprobs, strict=True)]
        assert sampled == score(answer["prompt_ids"][index // n], token_ids, temperature)


def test_the_server_is_known(client):
    assert client.model == "tiny" and client.get_world_size() == 1
    info = client.get_server_info()
    assert info["model_config"]["dtype"] and "weight_transfer_config" in info


@pytest.mark.parametrize("logprobs", [0, 3])
def test_prompts_are_completed_with_the_policys_log_probs(client, score, logprobs):
    answer = client.generate(PROMPTS, n=2, temperature=0.7, max_tokens=5, logprobs=logprobs)
    assert answer["prompt_ids"] == PROMPTS
    check_scores(answer, score, 0.7, 2)
    assert all(len(row) in (1, logprobs, logprobs + 1) for rows in answer["logprobs"] for row in rows)


def test_texts_are_completed_without_log_probs(client, ids_of):
    answer = client.generate(["hello"], max_tokens=3, logprobs=None, generation_kwargs={"seed": 7})
    assert answer["prompt_ids"] == [ids_of("hello")] and answer["logprobs"] is None


def test_conversations_are_answered_with_the_policys_log_probs(client, score):
    answer = client.chat(MESSAGES, n=2, temperature=1.3, max_tokens=4, logprobs=2, tools=[TOOL])
    check_scores(answer, score, 1.3, 2)
    plain = client.chat(MESSAGES[:1], max_tokens=1)
    assert len(answer["prompt_ids"][0]) > len(plain["prompt_ids"][0])  # tools stand in the prompt


def test_sequences_are_scored_by_the_policy(client, score):
    sequences, lengths = [[5, 6, 7, 8, 9], [10, 11, 12]], [2, 1]
    scored = client.get_sequence_logprobs(sequences, lengths, top_logprobs=64, temperature=1.5, chunk_size=1)
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        assert [value for [value] in scored["actual_logprobs"][index]] == score(
            sequence[:length], sequence[length:], 1.5
        )
        assert all(row == sorted(row, reverse=True) for row in scored["logprobs"][index])


def test_the_prefix_cache_is_reset(client):
    assert client.reset_prefix_cache() is None
