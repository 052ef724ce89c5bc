"""The session of a call in each dialect: it gives the prompt, and has the answer before the client has all of it."""

import asyncio
import json

import msgspec
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.anthropic import messages
from rollout_engine.serve.anthropic.body import MessagesBody
from rollout_engine.serve.app import App
from rollout_engine.serve.openai import chat, responses
from rollout_engine.serve.openai.chat import ChatBody
from rollout_engine.serve.openai.response_body import ResponsesBody
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.sessions.known_responses import KnownResponses
from rollout_engine.sessions.samples import join_parts

from .conftest import Client

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7]
DIALECTS = {
    "chat": (chat.create, ChatBody, {"messages": HELLO, "max_tokens": 40}),
    "responses": (responses.create, ResponsesBody, {"input": "hello", "max_output_tokens": 40}),
    "messages": (messages.create, MessagesBody, {"messages": HELLO, "max_tokens": 40}),
}
SAID = "<think>hm</think>good"


class Session:
    """Notes its calls; every request has the same prompt."""

    def __init__(self):
        self.known_responses = KnownResponses()
        self.calls, self.asked, self.samples, self.answers = [], [], [], []

    async def begin(self, messages, options, settings, *, lora=None):
        self.calls.append("begin")
        self.asked.append(messages)
        return {"prompt_token_ids": PROMPT}, settings._replace(params=settings.params.clone(logprobs=0))

    def record(self, parts, message):
        self.calls.append("record")
        self.samples.append(join_parts(parts))
        self.answers.append(message)


def ask(client, dialect, session, **fields):
    """(the reply's body, or None; its events, each with the session's calls before it)."""
    create, kind, body = DIALECTS[dialect]
    body = msgspec.convert({"seed": 1, "guided_choice": [SAID], **body, **fields}, kind)

    async def run():
        reply = await create(client.app.served, Asked(body, {}, "r", session=session))
        if isinstance(reply, Reply):
            return reply.body, []
        return None, [(event, list(session.calls)) async for event in reply.events]

    return asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_session_gives_the_prompt_and_has_the_answer(client, dialect):
    session = Session()
    body, _ = ask(client, dialect, session, return_token_ids=True)
    [message], [sample] = session.answers, session.samples
    assert session.calls == ["begin", "record"] and session.asked == [HELLO]
    assert body["prompt_token_ids"] == PROMPT and sample.logprobs is not None
    if dialect == "chat":
        assert message == {"role": "assistant", "content": SAID}
    else:
        assert message == {"role": "assistant", "content": "good", "reasoning_content": "hm"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_streamed_answer_is_recorded_before_its_last_event(client, dialect):
    whole, session = Session(), Session()
    ask(client, dialect, whole)
    _, events = ask(client, dialect, session, stream=True)
    assert "record" not in events[0][1] and "record" in events[-1][1]
    assert session.calls == ["begin", "record"] and session.answers == whole.answers
    [sample], [expected] = session.samples, whole.samples
    assert (sample.token_ids, sample.text, sample.version_spans, sample.finish_reason) == (
        expected.token_ids,
        expected.text,
        expected.version_spans,
        expected.finish_reason,
    )


def test_samples_of_a_chat_are_recorded_each(client):
    for stream in (False, True):
        session = Session()
        ask(client, "chat", session, n=2, stream=stream)
        assert session.calls == ["begin", "record", "record"]


def test_a_prefix_of_the_clients_own_is_refused(client):
    with pytest.raises(RequestError, match="in a session"):
        ask(client, "chat", Session(), required_prefix_token_ids=[5, 6])


def test_a_session_knows_its_responses(client):
    session = Session()
    first, _ = ask(client, "responses", session, instructions="Be brief.", store=True)
    assert first["store"] is True
    answer = {"role": "assistant", "content": "good", "reasoning_content": "hm"}
    said = ask(client, "responses", session, input="more", previous_response_id=first["id"], stream=True)
    assert session.asked[1] == [*HELLO, answer, {"role": "user", "content": "more"}]
    later = said[1][-1][0]["response"]["id"]
    ask(client, "responses", session, input="again", previous_response_id=later)
    assert len(session.asked[2]) == 5
    unknown, _ = ask(client, "responses", session, store=False)
    with pytest.raises(RequestError, match="still known"):
        ask(client, "responses", session, previous_response_id=unknown["id"])


@pytest.fixture(scope="module")
def gateway(policy):
    return Client(App(policy, ServeOptions(served_model_name="tiny", sessions=True)))


def below(gateway, made, path, body, *, stream=False):
    """The body of an answer in a session; of a stream, its last event."""
    headers = {"x-api-key": made["api_key"]}
    body = {"seed": 1, "guided_choice": [SAID], **body, "stream": stream}
    response = gateway.send("POST", f"/sessions/{made['id']}{path}", body, headers=headers)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()
    *_, last = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return json.loads(last.removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_turns_of_an_agent_become_one_row_of_the_sampled_ids(gateway, dialect, stream):
    made = gateway.post("/sessions", {})
    said = {"role": "user", "content": "hello"}
    if dialect == "responses":
        path = "/v1/responses"
        first = below(gateway, made, path, {"input": [said], "max_output_tokens": 40}, stream=stream)
        output = (first["response"] if stream else first)["output"]
        items = [said, *output, {"role": "user", "content": "more"}]
        below(gateway, made, path, {"input": items, "max_output_tokens": 40}, stream=stream)
    else:
        path, thinking = "/v1/messages", {"type": "thinking", "thinking": "hm", "signature": "any"}
        below(gateway, made, path, {"messages": [said], "max_tokens": 40}, stream=stream)
        answer = {"role": "assistant", "content": [thinking, {"type": "text", "text": "good"}]}
        turns = [said, answer, {"role": "user", "content": "more"}]
        below(gateway, made, path, {"messages": turns, "max_tokens": 40}, stream=stream)
    [row] = gateway.send("GET", f"/sessions/{made['id']}/rows").json()["rows"]
    assert sum(row["mask"]) == 2 * (len(SAID) + 1) and set(row["turns"]) >= {0, 1}
    assert [len(each["text"]) for each in row["samples"]] == [len(SAID)] * 2


def test_more_tokens_than_fit_are_as_many_as_fit(gateway, policy):
    made = gateway.post("/sessions", {})
    body = {"messages": HELLO, "max_tokens": 32_000, "guided_choice": None, "ignore_eos": True}
    answer = below(gateway, made, "/v1/messages", {**body, "return_token_ids": True})
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert len(answer["prompt_token_ids"]) + len(answer["token_ids"]) == 256
    assert gateway.send("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 32_000}).status_code == 400


def test_errors_below_a_session_have_the_dialects_shape(gateway):
    made = gateway.post("/sessions", {})
    headers = {"x-api-key": made["api_key"]}
    path = f"/sessions/{made['id']}/v1/messages"
    problem = gateway.send("POST", path, {"max_tokens": 4}, headers=headers).json()
    assert problem["type"] == "error" and "messages is missing" in problem["error"]["message"]
    assert '"messages": [{"role": "user"' in problem["error"]["message"]
    problem = gateway.send("POST", path, {"messages": HELLO}, headers=headers).json()
    assert 'max_tokens is missing: give it, for example "max_tokens": 1024' in problem["error"]["message"]
    body = {"messages": HELLO, "max_tokens": 4, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    problem = gateway.send("POST", path, body, headers=headers).json()
    assert "tools=['add'] is not allowed" in problem["error"]["message"]
    assert "chat_template=" in problem["error"]["message"]
    headers["x-api-key"] = "wrong"
    assert gateway.send("POST", path, {"max_tokens": 4}, headers=headers).json()["type"] == "error"


def test_known_responses_are_bounded():
    known = KnownResponses(most=2, most_bytes=900)
    for name in "abc":
        known.add(name, [], [{"role": "user", "content": "x" * 10}])
    assert (known.get("a"), len(known)) == (None, 2)
    known.add("d", known.get("c"), [{"role": "user", "content": "x" * 200}])
    assert known.get("c") is None and len(known.get("d")) == 2
    known.add("e", [], [{"role": "user", "content": "x" * 800}])
    assert len(known) == 0
