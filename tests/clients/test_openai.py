"""OpenAI's own client."""

import asyncio

import pytest

openai = pytest.importorskip("openai", minversion="3")

CLIENT = "openai"
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7, 8]
BODY = {"model": "tiny", "max_tokens": 6, "seed": 1}


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as made:
        yield made


def test_models_are_listed_and_got(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_completions_are_scored_alike_by_the_policy(client, score):
    answer = client.completions.create(prompt=PROMPT, n=2, logprobs=1, extra_body={"return_token_ids": True}, **BODY)
    assert len(answer.choices) == 2 and answer.usage.completion_tokens == 12
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs == score(PROMPT, choice.token_ids)


def test_chats_are_scored_alike_by_the_policy(client, score):
    more = {"logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
    [choice] = client.chat.completions.create(messages=HELLO, **more, **BODY).choices
    sent = [entry.logprob for entry in choice.logprobs.content]
    assert sent == score(choice.prompt_token_ids, choice.token_ids)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_streams_say_what_whole_answers_say(client):
    more = {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.completions.create(prompt="hello", **BODY).choices[0].text
    *chunks, last = client.completions.create(prompt="hello", **more, **BODY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole and last.usage.completion_tokens == 6
    said = client.chat.completions.create(messages=HELLO, **BODY).choices[0].message.content
    with client.chat.completions.stream(messages=HELLO, **BODY) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(texts) == said


def test_many_at_once_are_what_each_is_alone(url, client):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as asker:
            asked = [asker.completions.create(prompt=PROMPT, **{**BODY, "seed": seed}) for seed in range(8)]
            stream = await asker.chat.completions.create(messages=HELLO, stream=True, **BODY)
            texts = [chunk.choices[0].delta.content async for chunk in stream]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)], "".join(texts)

    texts, said = asyncio.run(ask())
    assert texts == [client.completions.create(prompt=PROMPT, **{**BODY, "seed": s}).choices[0].text for s in range(8)]
    assert said == client.chat.completions.create(messages=HELLO, **BODY).choices[0].message.content


def test_refusals_are_the_clients_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(prompt="x", **{**BODY, "max_tokens": 100_000})
