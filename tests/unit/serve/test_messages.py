"""Anthropic's messages: requests, and the JSON and events that its clients read."""

import json
from itertools import groupby

import pytest

HELLO = [{"role": "user", "content": "hello"}]
PATH = "/v1/messages"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} by <tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nI add. {CALL}"
TOOLS = {"tools": [ADD], "chat_template": TEMPLATE}


def saying(text, **more):
    """A request whose answer is this text, sampled token by token."""
    return {"messages": HELLO, "max_tokens": 200, "seed": 1, "guided_choice": [text], **more}


def masked(value):
    """A value with the ids that are new each time left out."""
    if isinstance(value, dict):
        return {key: "ID" if key in ("id", "signature") else masked(each) for key, each in value.items()}
    return [masked(each) for each in value] if isinstance(value, list | tuple) else value


def test_a_whole_answer(client):
    answer = client.post(PATH, saying("good"))
    assert masked(answer) == {
        "id": "ID",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "good"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": answer["usage"],
        "seed": 1,
        "version_spans": [[0, 5, 0, 0]],
        "weight_version": 0,
    }
    usage = answer["usage"]
    prompt = client.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1})["usage"]["prompt_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["output_tokens"] == 5 and usage["output_tokens_details"] == {"thinking_tokens": 0}


def test_thinking_words_and_calls_are_blocks(client):
    answer = client.post(PATH, saying(ANSWER, **TOOLS))
    assert masked(answer["content"]) == [
        {"type": "thinking", "thinking": "hm", "signature": "ID"},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "ID", "name": "add", "input": {"a": 1}},
    ]
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"][2]["id"].startswith("toolu_") and answer["content"][0]["signature"]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>\nhm\n</think>")}


def test_the_events_of_a_stream(client):
    events = client.named_events(PATH, saying(ANSWER, **TOOLS, return_token_ids=True))
    kinds = [(kind, len(list(group))) for kind, group in groupby(event["type"] for event in events)]
    assert [kind for kind, _ in kinds] == [
        *("message_start", "ping"),
        *(*("content_block_start", "content_block_delta", "content_block_stop") * 3,),
        *("message_delta", "message_stop"),
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert masked([(event["index"], event["content_block"]) for event in starts]) == masked(
        [
            (0, {"type": "thinking", "thinking": "", "signature": ""}),
            (1, {"type": "text", "text": ""}),
            (2, {"type": "tool_use", "id": "", "name": "add", "input": {}}),
        ]
    )
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "I add."
    assert [json.loads(each["partial_json"]) for each in deltas if each["type"] == "input_json_delta"] == [{"a": 1}]
    assert sum(delta["type"] == "signature_delta" for delta in deltas) == 1
    whole, last = client.post(PATH, saying(ANSWER, **TOOLS, return_token_ids=True)), events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == len(whole["token_ids"])
    assert (last["token_ids"], last["version_spans"]) == (whole["token_ids"], whole["version_spans"])
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0


def test_words_are_streamed(client):
    events = client.named_events(PATH, saying("good day"))
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == "good day"


@pytest.mark.parametrize(
    "fields, reason, sequence",
    [
        ({"stop_sequences": ["x"]}, "end_turn", None),
        ({"stop_sequences": ["x", "d d"]}, "stop_sequence", "d d"),
        ({"max_tokens": 3}, "max_tokens", None),
    ],
)
def test_reasons_to_stop(client, fields, reason, sequence):
    body = saying("good day", **fields)
    answer = client.post(PATH, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert client.named_events(PATH, body)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    if sequence is not None:
        assert answer["content"] == [{"type": "text", "text": "goo"}]


CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "1 + 1?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "any"},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "And now?"},
        ],
    },
]
SYSTEM = [{"type": "text", "text": "Be brief."}]


def test_a_conversation_is_the_same_prompt_as_in_openais_dialect(client):
    function = {"name": "add", "description": "Add.", "parameters": ADD["input_schema"]}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "2", "name": "add"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    more = {"max_tokens": 1, "return_token_ids": True, "chat_template": TEMPLATE}
    body = {"system": SYSTEM, "messages": CONVERSATION, "tools": [ADD], **more}
    token_ids = client.post(PATH, body)["prompt_token_ids"]
    assert token_ids == client.post("/v1/chat/completions", {**chat, **more})["prompt_token_ids"]
    count = {name: value for name, value in body.items() if name not in ("max_tokens", "return_token_ids")}
    assert client.post(f"{PATH}/count_tokens", count) == {"input_tokens": len(token_ids)}


def test_hidden_thinking_comes_back_in_its_signature(client):
    body = saying(ANSWER, **TOOLS, thinking={"type": "adaptive", "display": "omitted"})
    content = client.post(PATH, body)["content"]
    assert content[0]["thinking"] == ""
    deltas = [each["delta"] for each in client.named_events(PATH, body) if each["type"] == "content_block_delta"]
    assert not any(delta.get("thinking") for delta in deltas)
    redacted = {"type": "redacted_thinking", "data": content[0]["signature"]}
    shown = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": content[2]["id"], "content": "2"}]}
    counts = []
    for block in (content[0], redacted, shown, {**shown, "thinking": ""}):
        said = [*HELLO, {"role": "assistant", "content": [block, *content[1:]]}, result]
        counts.append(client.post(f"{PATH}/count_tokens", {"messages": said, "chat_template": TEMPLATE}))
    assert counts[0] == counts[1] == counts[2] != counts[3]


def test_the_answer_may_be_begun_by_the_client(client):
    begun = [*HELLO, {"role": "assistant", "content": "Good "}]
    answer = client.post(PATH, {"messages": begun, "max_tokens": 1, "return_token_ids": True})
    assert client.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"].endswith("<|assistant|>Good ")


def test_a_budget_of_thinking_is_forced(client):
    said = [{"role": "user", "content": "<think>"}]
    body = {"messages": said, "max_tokens": 14, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    answer = client.post(PATH, {**body, "thinking": {"type": "enabled", "budget_tokens": 4}})
    assert answer["forced"] == [4 <= index < 12 for index in range(14)]
    assert "forced" not in client.post(PATH, {**body, "thinking": {"type": "adaptive"}})


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}]
)
def test_an_answer_that_has_to_be_a_call_is_one(client, choice):
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"a": digit}, "required": ["a"], "additionalProperties": False}
    tools = [{**ADD, "input_schema": schema}]
    body = {"messages": HELLO, "max_tokens": 120, "seed": 2, **TOOLS, "tools": tools, "tool_choice": choice}
    answer = client.post(PATH, body)
    [call] = [block for block in answer["content"] if block["type"] == "tool_use"][:1]
    assert call["name"] == "add" and set(call["input"]) == {"a"}
    if choice["type"] == "tool":
        assert answer["content"] == [call] and answer["stop_reason"] == "tool_use"


def test_an_answer_may_have_to_be_json(client):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    for field in ({"output_config": {"format": form, "effort": "high"}}, {"output_format": form}):
        answer = client.post(f"{PATH}?beta=true", {"messages": HELLO, "max_tokens": 40, **field})
        assert json.loads(answer["content"][0]["text"]) == {"a": 1}


def test_fields_that_change_no_token_are_taken(client):
    more = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "mcp_servers": [],
        "speed": "standard",
        "tool_choice": {"type": "auto"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "one,two"}
    response = client.send("POST", PATH, saying("good", **more), headers=headers)
    assert response.status_code == 200 and response.headers["request-id"] == response.headers["x-request-id"]


BLOCK = {"role": "user", "content": [{"type": "document"}]}
IMAGE = {"type": "image", "source": {"type": "file", "file_id": "f"}}
REDACTED = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "?"}]}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]=3"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]['role']='robot'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0]['content']=[]"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0]['mood']"),
        ({"messages": [BLOCK]}, "messages[0]['content'][0]['type']='document'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0]['content'][0]['source']['type']='file'"),
        ({"messages": [*HELLO, REDACTED]}, "messages[1]['content'][0]['data']"),
        ({"system": [{"type": "image"}]}, "system[0]['type']='image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]['type']"),
        ({"tools": [{"name": "add"}]}, "tools[0]['input_schema']"),
        ({"tools": [ADD]}, "teaches no form of calls"),
        ({**TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "one of the tools: add"),
        ({"tool_choice": {"type": "any"}}, "given with tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice['type']='some'"),
        ({"thinking": {"type": "enabled"}}, "thinking['budget_tokens']=None"),
        ({"thinking": {"type": "often"}}, "thinking['type']='often'"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "n=2"),
        ({"container": "c"}, "container"),
        ({"tempratur": 1}, "Did you mean 'temperature'?"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config['format']['type']='xml'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, fields, said):
    body = {"messages": HELLO, "max_tokens": 4, **fields}
    response = client.send("POST", PATH, {name: value for name, value in body.items() if value is not None})
    assert response.status_code == 400
    problem = response.json()
    assert problem["type"] == "error" and problem["error"]["type"] == "invalid_request_error"
    assert said in problem["error"]["message"]


def test_errors_have_anthropics_types(client):
    body = {"messages": HELLO, "max_tokens": 1}
    assert client.problem(PATH, {**body, "model": "gpt"}, status=404)["type"] == "not_found_error"
    headers = {"origin": "https://evil.example"}
    assert client.problem(PATH, body, status=403, headers=headers)["type"] == "permission_error"
    assert client.problem(f"{PATH}/count_tokens", {}, status=400)["type"] == "invalid_request_error"
