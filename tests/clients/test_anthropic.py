"""Anthropic's own client."""

import pytest

anthropic = pytest.importorskip("anthropic", minversion="2")

CLIENT = "anthropic"
HELLO = [{"role": "user", "content": "hello"}]
BODY = {"model": "tiny", "max_tokens": 200}
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as made:
        yield made


def saying(text):
    """A request whose answer is this text."""
    return {"messages": HELLO, **BODY, "extra_body": {"guided_choice": [text], "seed": 1}}


def test_messages_are_answered(client):
    answer = client.messages.create(**saying("good"))
    assert answer.content[0].text == "good" and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 5 and answer.usage.output_tokens_details.thinking_tokens == 0
    assert answer._request_id is not None


def test_streams_say_what_whole_answers_say(client):
    with client.messages.stream(**saying("<think>hm</think>good day")) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == "good day"
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == "hm" and final.content[0].signature
    assert (
        final.usage.output_tokens == client.messages.create(**saying("<think>hm</think>good day")).usage.output_tokens
    )


def test_a_tool_is_called_and_its_result_read(client):
    asked = {**saying(f"I add. {CALL}"), "tools": [ADD], "tool_choice": {"type": "auto"}}
    answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use" and answer.content[1].input == {"a": 1}
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "2"}
    said = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**asked, "messages": said}).stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[1].input == {"a": 1} and final.stop_reason == "tool_use"


def test_tokens_are_counted(client):
    count = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.").input_tokens
    answer = client.messages.create(**{**saying("good"), "system": "Be brief."})
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == count


def test_new_features_are_asked_for(client):
    answer = client.beta.messages.create(**saying("good"), betas=["interleaved-thinking-2025-05-14"])
    assert answer.content[0].text == "good"


def test_refusals_are_the_clients_own_errors(client):
    with pytest.raises(anthropic.NotFoundError, match="'gpt'"):
        client.messages.create(**{**saying("good"), "model": "gpt"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        client.messages.create(**{**saying("good"), "max_tokens": 5_000})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
