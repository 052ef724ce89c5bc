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


def saying(text):
    """A response that is this text."""
    extra = {"guided_choice": [text], "seed": 1}
    return {"model": "tiny", "input": "hello", "max_output_tokens": 200, "extra_body": extra}


def test_responses_say_the_same_whole_and_streamed(client):
    answer = client.responses.create(**saying("<think>hm</think>good day"))
    assert answer.output_text == "good day" and answer.output[0].content[0].text == "hm"
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    with client.responses.stream(**saying("<think>hm</think>good day")) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "good day"
    assert final.output[0].content[0].text == "hm"


def test_a_response_calls_a_tool_and_reads_its_result(client):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    asked = {**saying(call), "tools": [tool]}
    [item] = client.responses.create(**asked).output
    assert (item.type, item.name, item.arguments) == ("function_call", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
    said = [{"role": "user", "content": "hello"}, item, result]
    assert client.responses.create(**{**asked, "input": said}).status == "completed"
    with client.responses.stream(**asked) as stream:
        [final] = stream.get_final_response().output
    assert (final.name, final.arguments) == ("add", '{"a": 1}')


def test_a_response_that_was_not_kept_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="not stored") as caught:
        client.responses.create(**saying("good"), previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


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
