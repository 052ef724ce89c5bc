"""OpenAI's responses: requests, and the JSON and events that its clients read."""

import json
from itertools import groupby

import pytest

PATH = "/v1/responses"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} by <tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nI add. {CALL}"
TOOLS = {"tools": [ADD], "chat_template": TEMPLATE}


def saying(said, **more):
    """A request whose answer is this text, sampled token by token."""
    return {"input": "hello", "max_output_tokens": 140, "seed": 1, "guided_choice": [said], **more}


def masked(value):
    """A value with the ids that are new each time left out."""
    if isinstance(value, dict):
        return {key: "ID" if key in ("id", "call_id", "item_id") else masked(each) for key, each in value.items()}
    return [masked(each) for each in value] if isinstance(value, list | tuple) else value


def text_part(text):
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


ITEMS = [
    {
        "id": "ID",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "status": "completed",
    },
    {"id": "ID", "type": "message", "role": "assistant", "content": [text_part("I add.")], "status": "completed"},
    {
        "id": "ID",
        "type": "function_call",
        "call_id": "ID",
        "name": "add",
        "arguments": '{"a": 1}',
        "status": "completed",
    },
]


def test_a_whole_answer(client):
    body = saying("good", instructions="Be brief.", metadata={"a": "b"})
    answer = client.post(PATH, body)
    assert answer["id"].startswith("resp_") and answer["completed_at"] >= answer["created_at"]
    message = {"id": "ID", "type": "message", "role": "assistant", "content": [text_part("good")]}
    assert masked(answer["output"]) == [{**message, "status": "completed"}]
    expected = {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 140,
        "metadata": {"a": "b"},
        "model": "tiny",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "seed": 1,
        "weight_version": 0,
    }
    assert {name: answer[name] for name in expected} == expected
    usage = answer["usage"]
    assert usage["output_tokens"] == 5 and usage["total_tokens"] == usage["input_tokens"] + 5
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_thinking_words_and_calls_are_items(client):
    answer = client.post(PATH, saying(ANSWER, **TOOLS))
    assert masked(answer["output"]) == ITEMS and answer["status"] == "completed"
    assert answer["output"][2]["call_id"].startswith("call_")
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>\nhm\n</think>")}


def test_the_events_of_a_stream(client):
    events = client.named_events(PATH, saying(ANSWER, **TOOLS, return_token_ids=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert masked(done) == ITEMS
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [(each["output_index"], each["item"]["id"]) for each in added] == [(i, done[i]["id"]) for i in range(3)]
    assert all(each["item"]["status"] == "in_progress" for each in added)
    last, whole = events[-1]["response"], client.post(PATH, saying(ANSWER, **TOOLS, return_token_ids=True))
    assert last["output"] == done and last["token_ids"] == whole["token_ids"]
    same = ("status", "usage", "seed", "version_spans", "prompt_token_ids")
    assert {name: last[name] for name in same if name != "usage"} == {n: whole[n] for n in same if n != "usage"}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None


def test_words_are_streamed_with_their_log_probs(client):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = saying("<think>hm</think>good day", **more)
    events = client.named_events(PATH, body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(each["delta"] for each in deltas) == "good day"
    [whole] = client.post(PATH, body)["output"][1]["content"]
    assert "".join(row["token"] for row in whole["logprobs"]) == "good day<eos>"
    assert all(len(row["top_logprobs"]) == 2 for row in whole["logprobs"])
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == whole["logprobs"]
    streamed = sum((each["logprobs"] for each in deltas), [])
    assert streamed in (whole["logprobs"][:8], whole["logprobs"])  # whether the end comes with the last words is chance


def test_an_answer_that_is_cut_is_incomplete(client):
    body = saying("good day", max_output_tokens=3)
    answer = client.post(PATH, body)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    last = client.named_events(PATH, body)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["status"] == "incomplete"


def test_a_conversation_is_the_same_prompt_as_in_chats(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    function = {name: ADD[name] for name in ("name", "description", "parameters")}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2", "name": "add"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"id": "msg", "status": "completed", "type": "message", "role": "assistant", "content": [text_part("I add.")]},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}', "id": "fc"},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        {"role": "user", "content": "And now?"},
    ]
    more = {"return_token_ids": True, "chat_template": TEMPLATE}
    body = {"instructions": "Be brief.", "input": items, "tools": [ADD], "max_output_tokens": 1, **more}
    token_ids = client.post(PATH, body)["prompt_token_ids"]
    assert token_ids == client.post("/v1/chat/completions", {**chat, **more, "max_tokens": 1})["prompt_token_ids"]


def test_an_answer_comes_back_as_it_was_given(client):
    body = saying(ANSWER, **TOOLS, include=["reasoning.encrypted_content"], return_token_ids=True)
    output = client.post(PATH, body)["output"]
    sealed = [{**output[0], "content": []}, *output[1:]]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "2"}
    prompts = [
        client.post(PATH, {**body, "input": [{"role": "user", "content": "hello"}, *items, result]})["prompt_token_ids"]
        for items in (output, sealed, output[1:])
    ]
    assert prompts[0] == prompts[1] != prompts[2]
    text = client.post("/detokenize", {"tokens": prompts[0]})["prompt"]
    assert '<assistant>hmI add.{"name": "add", "arguments": {"a": 1}}<eos><tool>2' in text


def test_an_answer_may_have_to_be_json_or_a_call(client):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = client.post(PATH, {"input": "hello", "max_output_tokens": 40, "text": {"format": form}})
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 1}
    tools = [{**ADD, "parameters": schema, "strict": True}]
    more = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 120}
    [item] = client.post(PATH, {"input": "hello", **TOOLS, "tools": tools, **more})["output"]
    assert (item["type"], json.loads(item["arguments"])) == ("function_call", {"a": 1})


def test_fields_that_change_no_token_are_taken(client):
    more = {
        "store": False,
        "user": "u",
        "service_tier": "auto",
        "truncation": "disabled",
        "background": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "stream_options": {"include_obfuscation": False},
    }
    assert client.post(PATH, saying("good", **more))["status"] == "completed"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]['type']"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]['type']"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0]['content'][0]['type']"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0]['mood']"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0]['arguments']"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0]['encrypted_content']"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]['type']"),
        ({"tools": [{"type": "function"}]}, "tools[0]['name']"),
        ({"tools": [ADD]}, "tools"),
        ({**TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice['type']"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2, "max_tokens": 3}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text['format']['type']"),
        ({"text": {"format": {"type": "json_schema"}}}, "text['format']['schema']"),
        ({"reasoning": {"effort": 3}}, "reasoning['effort']"),
        ({"n": 2}, "n"),
        ({"temperatur": 1}, "temperatur"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, fields, param):
    problem = client.problem(PATH, {"input": "hello", **fields})
    assert problem["param"] == param and param.split("[")[0] in problem["message"]
