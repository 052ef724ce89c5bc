"""The train client of verifiers and renderers: conversations as token ids, by /inference/v1/generate."""

import asyncio

import pytest

pytest.importorskip("verifiers")
pytest.importorskip("verifiers.v1")

from verifiers.v1.clients.train import TrainClient  # noqa: E402
from verifiers.v1.configs.client import TrainClientConfig  # noqa: E402
from verifiers.v1.dialects import ChatDialect  # noqa: E402
from verifiers.v1.types import SamplingConfig  # noqa: E402

CLIENT = "verifiers"
HELLO = [{"role": "user", "content": "hello"}]


def ask(url, checkpoint, messages=HELLO, **settings):
    config = TrainClientConfig(base_url=f"{url}/v1", api_key_var="NONE", renderer_model_name=str(checkpoint))

    async def get():
        client = TrainClient(config)
        body = {"model": "tiny", "messages": messages}
        return await client.get_response(ChatDialect(), body, SamplingConfig(**settings), session_id="trace")

    return asyncio.run(get())


def test_turns_have_the_policys_tokens_and_log_probs(url, checkpoint, score):
    response = ask(url, checkpoint, max_tokens=6, temperature=0.8, seed=3)
    tokens = response.tokens
    assert 0 < len(tokens.completion_ids) <= 6 and response.finish_reason in ("stop", "length")
    assert list(tokens.completion_logprobs) == score(tokens.prompt_ids, tokens.completion_ids, 0.8)


def test_prompts_longer_than_the_model_are_refused_before_they_are_sent(url, checkpoint):
    with pytest.raises(Exception, match="maximum context length"):
        ask(url, checkpoint, [{"role": "user", "content": "x" * 3000}], max_tokens=1)
