"""The session of a call: it gives the prompt, and has the whole answer before the client has all of it."""

import asyncio

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.anthropic import messages
from rollout_engine.serve.anthropic.body import MessagesBody
from rollout_engine.serve.chat.known_responses import KnownResponses
from rollout_engine.serve.openai import chat, responses
from rollout_engine.serve.openai.chat import ChatBody
from rollout_engine.serve.openai.response_body import ResponsesBody
from rollout_engine.serve.route import Asked, Reply

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

    def __init__(self, problem=None):
        self.known_responses, self.problem = KnownResponses(), problem
        self.calls, self.requests, self.results, self.answers = [], [], [], []

    async def begin(self, request):
        self.calls.append("begin")
        self.requests.append(request)
        if self.problem is not None:
            raise self.problem
        return len(self.requests), {"prompt_token_ids": PROMPT}

    def record(self, place, result, answers):
        self.calls.append(f"record {place}")
        self.results.append(result)
        self.answers += answers

    def cancel(self, place):
        self.calls.append(f"cancel {place}")


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
    ask(client, dialect, session, return_token_ids=True)
    [request], [result], [message] = session.requests, session.results, session.answers
    assert session.calls == ["begin", "record 1"]
    assert (request.messages, request.tools, request.stream) == (HELLO, None, False)
    assert result.prompt_token_ids == PROMPT and result.outputs[0].logprobs is not None
    if dialect == "chat":
        assert message == {"role": "assistant", "content": SAID}
    else:
        assert message == {"role": "assistant", "content": "good", "reasoning_content": "hm"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_streamed_answer_is_recorded_whole_before_its_last_event(client, dialect):
    whole, session = Session(), Session()
    ask(client, dialect, whole)
    _, events = ask(client, dialect, session, stream=True)
    assert "record 1" not in events[0][1] and "record 1" in events[-1][1]
    assert session.calls == ["begin", "record 1"] and session.answers == whole.answers
    [sample], [expected] = session.results[0].outputs, whole.results[0].outputs
    assert (sample.token_ids, sample.text, sample.version_spans, sample.finish_reason) == (
        expected.token_ids,
        expected.text,
        expected.version_spans,
        expected.finish_reason,
    )
    assert np.array_equal(sample.logprobs, expected.logprobs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_fails_is_cancelled(client, dialect, stream, monkeypatch):
    session, refused = Session(), RequestError("No.")
    with pytest.raises(RequestError, match="No"):
        ask(client, dialect, Session(refused), stream=stream)

    async def fail(*_, **__):
        raise refused

    monkeypatch.setattr("rollout_engine.serve.generation.Generation.start", fail)
    with pytest.raises(RequestError, match="No"):
        ask(client, dialect, session, stream=stream)
    assert session.calls == ["begin", "cancel 1"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_leaves_cancels(client, dialect):
    session = Session()
    create, kind, body = DIALECTS[dialect]
    body = msgspec.convert({**body, "stream": True, "ignore_eos": True}, kind)

    async def leave():
        reply = await create(client.app.served, Asked(body, {}, "r", session=session))
        await anext(reply.events)
        await reply.events.aclose()

    asyncio.run(leave())
    assert session.calls == ["begin", "cancel 1"]


def test_samples_of_a_chat_are_recorded_together(client):
    for stream in (False, True):
        session = Session()
        ask(client, "chat", session, n=2, stream=stream)
        assert session.calls == ["begin", "record 1"]
        assert len(session.results[0].outputs) == len(session.answers) == 2


def test_a_prefix_of_the_clients_own_is_refused(client):
    with pytest.raises(RequestError, match="in a session"):
        ask(client, "chat", Session(), required_prefix_token_ids=[5, 6])


def test_a_session_knows_its_responses(client):
    session = Session()
    first, _ = ask(client, "responses", session, instructions="Be brief.", store=True)
    assert first["store"] is True
    answer = {"role": "assistant", "content": "good", "reasoning_content": "hm"}
    said = ask(client, "responses", session, input="more", previous_response_id=first["id"], stream=True)
    assert session.requests[1].messages == [*HELLO, answer, {"role": "user", "content": "more"}]
    later = said[1][-1][0]["response"]["id"]
    ask(client, "responses", session, input="again", previous_response_id=later)
    assert len(session.requests[2].messages) == 5
    unknown, _ = ask(client, "responses", session, store=False)
    with pytest.raises(RequestError, match="still known"):
        ask(client, "responses", session, previous_response_id=unknown["id"])


def test_known_responses_are_bounded():
    known = KnownResponses(most=2, most_chars=100)
    for name in "abc":
        known.add(name, [], [{"role": "user", "content": "x" * 10}])
    assert (known.get("a"), len(known)) == (None, 2)
    known.add("d", known.get("c"), [{"role": "user", "content": "x" * 80}])
    assert known.get("c") is None and len(known.get("d")) == 2
    known.add("e", [], [{"role": "user", "content": "x" * 200}])
    assert len(known) == 0
