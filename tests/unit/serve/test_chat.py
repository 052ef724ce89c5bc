import asyncio
import json

import pytest

from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.text.chat_turns import ChatTurns

from .conftest import Client

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} by <tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}<assistant>"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TOOLS = {"tools": [ADD], "chat_template": TEMPLATE}
STRICT = {"function": ADD["function"] | {"strict": True}}
FORM = {"guided_regex": "a"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NUMBERS = {
    "type": "object",
    "properties": {"a": DIGIT, "b": DIGIT},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_an_answer_has_ids_and_log_probs_in_every_shape_that_clients_read(client):
    body = {
        "messages": HELLO,
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    answer = client.post("/v1/chat/completions", body)
    [choice] = answer["choices"]
    rows = choice["logprobs"]["content"]
    assert [row["token_id"] for row in rows] == choice["token_ids"]
    assert answer["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all(len(row["top_logprobs"]) == 2 for row in rows)
    content = b"".join(bytes(row["bytes"]) for row in rows)
    assert content.decode(errors="replace") == choice["message"]["content"]
    assert answer["weight_version"] == choice["version_spans"][-1][2] == 0
    by_ids = client.post("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True, "seed": choice["seed"]})
    rows = by_ids["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in rows] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_a_stream_gives_the_same_as_a_whole_answer(client):
    body = {"messages": HELLO, "max_tokens": 6, "seed": 5, "n": 2, "return_token_ids": True, "logprobs": True}
    whole = client.post("/v1/chat/completions", body)["choices"]
    events = client.events("/v1/chat/completions", body)
    for choice in whole:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert ["role" in part["delta"] for part in parts] == [True] + [False] * (len(parts) - 1)
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
        assert sum((part["logprobs"]["content"] for part in parts), []) == choice["logprobs"]["content"]


def test_a_later_turn_keeps_the_ids_that_were_sampled(client):
    served = client.app.served
    first = client.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "return_token_ids": True})
    [choice] = first["choices"]
    so_far = choice["prompt_token_ids"] + choice["token_ids"]
    said, new = {"role": "assistant", "content": choice["message"]["content"]}, {"role": "user", "content": "more"}
    body = {"messages": [*HELLO, said, new], "required_prefix_token_ids": so_far, "max_tokens": 2}
    [later] = client.post("/v1/chat/completions", {**body, "return_token_ids": True})["choices"]
    assert later["prompt_token_ids"] == so_far + ChatTurns(served.codec).glue([new], so_far)


KEEPS_THINKING_FOR_TOOLS = (
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if loop.index0 < ns.asked else m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_required_prefix_is_kept_if_the_template_writes_what_was_sampled(client, monkeypatch):
    codec = client.app.served.codec
    monkeypatch.setattr(codec.hf, "chat_template", KEEPS_THINKING_FOR_TOOLS)
    said = "<think>hm</think>five"
    so_far = codec.encode(f"<user>hi<eos><assistant>{said}<eos>", add_special_tokens=False)
    body = {"required_prefix_token_ids": so_far, "max_tokens": 1}
    past = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "five"}]  # as a client that parsed it

    called = {**body, "messages": [*past, {"role": "tool", "content": "5"}], "return_token_ids": True}
    [choice] = client.post("/v1/chat/completions", called)["choices"]
    assert codec.decode(choice["prompt_token_ids"]) == f"<user>hi<eos><assistant>{said}<eos><tool>5<eos><assistant>"
    asked = {**body, "messages": [*past, {"role": "user", "content": "and?"}]}
    assert "rewrites earlier turns" in client.problem("/v1/chat/completions", asked)["message"]
    plain = codec.encode("<user>hi<eos><assistant>five<eos>", add_special_tokens=False)
    [choice] = client.post("/v1/chat/completions", {**asked, "required_prefix_token_ids": plain})["choices"]
    assert choice["finish_reason"] == "length"


def test_messages_that_the_template_would_leave_out_are_refused(client):
    template = "{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    body = {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO], "chat_template": template}
    for path in ("/v1/chat/completions", "/tokenize"):
        problem = client.problem(path, body)
        assert problem["param"] == "messages[0]['role']" and "as 'system'" in problem["message"]


def test_a_required_prefix_needs_an_answer_and_something_after_it(client):
    body = {"messages": HELLO, "required_prefix_token_ids": [5, 6]}
    assert "messages that have an answer" in client.problem("/v1/chat/completions", body)["message"]


@pytest.fixture
def says(policy, client, monkeypatch):
    """An application whose every answer is a given text, of which a stop string may have left less to show."""

    def make(text, shown=None):
        app = App(policy, ServeOptions(trust_request_chat_template=True))
        app.served.templates = client.app.served.templates  # one process for all
        token_ids = app.served.codec.encode(text, add_special_tokens=False)
        take = app.served.engine.frontend.take

        def taken(stream):
            output = take(stream)
            for sample in output.outputs if output is not None else ():
                if sample.finish_reason is not None:
                    sample.token_ids, sample.text, sample.finish_reason = token_ids, shown or text, "stop"
            return output

        monkeypatch.setattr(app.served.engine.frontend, "take", taken)
        return Client(app)

    return make


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def answered(request, says):
    """The choice of one answer, and its message, from a whole response and from a stream."""

    def ask(text, **fields):
        body = {"messages": HELLO, **TOOLS, "max_tokens": 1} | fields
        if request.param:
            [event] = says(text).events("/v1/chat/completions", body)
            [choice] = event["choices"]
            return choice, choice["delta"]
        [choice] = says(text).post("/v1/chat/completions", body)["choices"]
        return choice, choice["message"]

    return ask


def called(message):
    """(name, arguments) of the calls of a message; the arguments are strict JSON."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"], parse_constant=pytest.fail)) for each in functions]


BROKEN = '<tool_call>{"name": add}</tool_call>'
THINKING = f"<think>\nI could {CALL}.\n</think>"


@pytest.mark.parametrize(
    "text, calls, content",
    [
        (f"I add. {CALL}", [("add", {"a": 1})], "I add."),
        (CALL, [("add", {"a": 1})], None),
        (f"I add. {CALL}\n{CALL} Done.", [("add", {"a": 1})] * 2, "I add.\nDone."),
        (f"{CALL}\n{BROKEN}", [("add", {"a": 1})], BROKEN),
        (f"{BROKEN}{CALL}", [("add", {"a": 1})], BROKEN),
        (f"{THINKING}\n\n{CALL}", [("add", {"a": 1})], THINKING),
        (f"{THINKING}\n\nNo.", [], f"{THINKING}\n\nNo."),
        (CALL.replace("1", '"a </tool_call> b"'), [("add", {"a": "a </tool_call> b"})], None),
        (CALL.replace("1", r'"\ud800"'), [("add", {"a": "\ufffd"})], None),
        (CALL.replace("1", "NaN"), [], CALL.replace("1", "NaN")),
        (CALL.replace("1", "1e999"), [], CALL.replace("1", "1e999")),
    ],
)
def test_an_answer_is_divided_into_calls_and_words(answered, text, calls, content):
    choice, message = answered(text)
    assert called(message) == calls and message["content"] == content
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_call_drafted_in_thinking_that_the_prompt_has_opened_stays_text(answered):
    _, message = answered(CALL, chat_template=TEMPLATE + "<think>\n")
    assert not called(message) and message["content"] == CALL
    _, message = answered(f"{CALL}</think>{CALL}", chat_template=TEMPLATE + "<think>\n")
    assert called(message) == [("add", {"a": 1})] and message["content"] == f"{CALL}</think>"


@pytest.mark.parametrize(
    "template, text",
    [
        ("<tool_call><arg_key>", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("<tool_call><function=", "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"),
        ("<seed:tool_call>", "<seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>"),
        ("<|python_tag|>", '{"name": "add", "parameters": {"a": 1}}'),
    ],
)
def test_calls_are_found_as_the_template_teaches_them(answered, template, text):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    _, message = answered(text, tools=[tool], chat_template=TEMPLATE.replace("<tool_call>", template))
    assert called(message) == [("add", {"a": 1})] and message["content"] is None


def test_a_call_whose_end_a_stop_string_has_cut_is_no_word(says):
    client = says(f"I add. {CALL}", shown=f"I add. {CALL}".removesuffix("</tool_call>"))
    [choice] = client.post("/v1/chat/completions", {"messages": HELLO, **TOOLS, "max_tokens": 1})["choices"]
    assert called(choice["message"]) == [("add", {"a": 1})] and choice["message"]["content"] == "I add."


def test_a_broken_call_stays_text(says):
    text = '<tool_call>{"name": add}</tool_call>'
    body = {"messages": HELLO, "tools": [ADD], "chat_template": TEMPLATE, "max_tokens": 1}
    [choice] = says(text).post("/v1/chat/completions", body)["choices"]
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"messages": [1, "x"]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": HELLO, "tools": [ADD]}, "teaches no form of calls"),
        ({"messages": HELLO, "tool_choice": "required"}, "given with tools"),
        ({"messages": HELLO, "tools": [ADD], "tool_choice": "always"}, '"auto", "none", "required"'),
        ({"messages": HELLO, **TOOLS, "tool_choice": {"function": {"name": "sub"}}}, "one of the tools: add"),
        ({"messages": HELLO, **TOOLS, "tool_choice": "required", **FORM}, "tool_choice or a strict tool"),
        ({"messages": HELLO, **TOOLS, "tools": [STRICT], **FORM}, "tool_choice or a strict tool"),
        ({"messages": HELLO, "tools": [3]}, "tools[0]=3"),
        ({"messages": HELLO, "top_logprobs": 2}, "logprobs=true"),
        ({"messages": HELLO, "response_format": {"type": "jsn"}}, '"json_object"'),
        ({"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, "Give one of them"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens=0 is not allowed"),
        ({"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens=-1 is not allowed"),
    ],
)
def test_what_cannot_be_served_is_refused(client, fields, said):
    assert said in client.problem("/v1/chat/completions", fields)["message"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["<tool_call>", "<|python_tag|>", "<tool_call><function=", "<seed:tool_call>", ""])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
def test_an_answer_that_has_to_be_a_call_is_one(client, form, choice):
    template = TEMPLATE.replace("{{ tool | tojson }} by <tool_call>", form) + "<think>"
    tools = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in ("add", "sub")]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice, "chat_template": template}
    found = set()
    for seed in range(4):
        [answer] = client.post("/v1/chat/completions", {**body, "max_tokens": 120, "seed": seed})["choices"]
        call = answer["message"]["tool_calls"][0]
        assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
        found.add(call["function"]["name"])
        if choice != "required":
            assert len(answer["message"]["tool_calls"]) == 1 and answer["finish_reason"] == "tool_calls"
            assert answer["message"]["content"] is None
    assert found == {"sub"} if choice != "required" else found <= {"add", "sub"}


def test_text_and_ids_convert_both_ways(client):
    tokens = client.post("/tokenize", {"prompt": "hello", "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert client.post("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "hello"}
    chat = client.post("/tokenize", {"messages": HELLO})["tokens"]
    answer = client.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "return_token_ids": True})
    assert answer["prompt_token_ids"] == chat
    assert "token ids from 0 to" in client.problem("/detokenize", {"tokens": [10**6]})["message"]


def test_tools_stand_in_the_prompt_of_a_client_that_finds_calls_by_itself(client):
    body = {"messages": HELLO, "chat_template": TEMPLATE, "max_tokens": 1, "return_token_ids": True}
    lengths = [
        len(client.post("/v1/chat/completions", {**body, **more})["prompt_token_ids"])
        for more in ({}, {"tools": [ADD]}, {"tools": [ADD], "tool_choice": "none"})
    ]
    assert lengths[0] < lengths[1] == lengths[2]


@pytest.mark.parametrize("choice", ["none", "required"])
def test_a_conversation_with_tools_is_not_rendered_on_the_event_loop(client, monkeypatch, choice):
    codec, rendered = client.app.served.codec, []
    shows_tools = codec.shows_tools

    def off_the_loop(*args, **options):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        rendered.append(True)
        return shows_tools(*args, **options)

    monkeypatch.setattr(codec, "shows_tools", off_the_loop)
    client.post("/v1/chat/completions", {"messages": HELLO, "tools": [ADD], "tool_choice": choice, "max_tokens": 1})
    assert rendered


def test_thinking_is_apart_if_it_is_asked_for(client):
    text = f"<think>\nhm\n</think>\n\nI add. {CALL}"
    body = {"messages": HELLO, **TOOLS, "guided_choice": [text], "max_tokens": 110, "separate_reasoning": True}
    [choice] = client.post("/v1/chat/completions", body)["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], called(message)) == ("hm", "I add.", [("add", {"a": 1})])
    deltas = [event["choices"][0]["delta"] for event in client.events("/v1/chat/completions", body)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    words = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(words) == "I add."
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert called({"tool_calls": calls}) == [("add", {"a": 1})] and calls[0]["index"] == 0
    [plain] = client.post("/v1/chat/completions", {**body, "separate_reasoning": False})["choices"]
    assert (
        plain["message"]["content"] == "<think>\nhm\n</think>\n\nI add." and "reasoning_content" not in plain["message"]
    )
