"""OpenAI's own client, unmodified, on a socket and in process."""

import asyncio

import httpx2
import openai
import pytest

from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(policy):
    with HttpServer(policy, ServeOptions(port=0, api_key="secret", admin_key="other", max_connections=64)) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def synchronous(url):
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


def test_models_completions_and_chats(synchronous):
    [model] = synchronous.models.list().data
    body = {"model": model.id, "max_tokens": 4, "seed": 1}
    completion = synchronous.completions.create(prompt="hello", logprobs=1, n=2, **body)
    assert [len(choice.logprobs.token_logprobs) for choice in completion.choices] == [4, 4]
    assert completion.choices[0].version_spans == [[0, 4, 0, 0]] and completion.usage.completion_tokens == 8
    answer = synchronous.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **body)
    assert len(answer.choices[0].logprobs.content) == 4 and answer.choices[0].message.role == "assistant"


def test_streams(synchronous):
    body = {"model": "default", "max_tokens": 6, "seed": 2}
    whole = synchronous.completions.create(prompt="hello", **body)
    parts = list(synchronous.completions.create(prompt="hello", stream=True, **body))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    said = synchronous.chat.completions.create(messages=HELLO, **body).choices[0].message.content
    chunks = list(
        synchronous.chat.completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **body)
    )
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == said
    assert chunks[-1].usage.completion_tokens == 6


def test_responses(synchronous):
    body = {"model": "default", "input": "hello", "max_output_tokens": 40, "extra_body": {"guided_choice": ["good"]}}
    answer = synchronous.responses.create(**body)
    assert answer.output_text == "good" and answer.status == "completed"
    with synchronous.responses.stream(**body) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == "good"


def test_errors_are_the_clients_own(synchronous, url):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        synchronous.completions.create(model="default", prompt="x", max_tokens=100_000)
    with pytest.raises(openai.NotFoundError, match="'gpt'"):
        synchronous.completions.create(model="gpt", prompt="x")
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            stranger.models.list()


def test_many_at_once_on_one_loop(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            asked = [
                client.completions.create(model="default", prompt=[5, 6, 7], max_tokens=8, seed=index)
                for index in range(20)
            ]
            return [answer.choices[0].seed for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == list(range(20))


def test_in_process_without_a_socket(client):
    async def ask():
        http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(client.app))
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="-", http_client=http_client) as asker:
            more = {"max_tokens": 3, "extra_body": {"ignore_eos": True}}
            return await asker.chat.completions.create(model="tiny", messages=HELLO, **more)

    assert asyncio.run(ask()).usage.completion_tokens == 3
