"""Bounds of sessions over HTTP: late ends, answers that a session cuts, and long conversations behind short bodies."""

import asyncio
import gc
import threading
import weakref

import httpx2
import pytest

from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.route import Events, Reply
from rollout_engine.serve.sessions.retries import Retries
from rollout_engine.sessions.memory import Memory

from .test_sessions import CHAT, HELLO, Agents, path_of


@pytest.fixture(scope="module")
def agents(policy):
    return Agents(App(policy, ServeOptions(sessions=True, api_key="client-key", admin_key="admin-key")))


def test_requests_of_a_session_that_ended_long_ago_are_cancelled_from_any_thread(agents):
    session = agents.session()
    held, sessions = agents.held(session), agents.app.served.sessions

    async def end():
        transport = httpx2.ASGITransport(agents.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {session['api_key']}"}
            task = asyncio.ensure_future(
                client.post(path_of(session), json=CHAT | {"max_tokens": 200}, headers=headers)
            )
            while not held.num_open:
                await asyncio.sleep(0.001)
            sessions.registry._late = [(0.0, held.id)]
            await asyncio.to_thread(sessions.end_late)
            return await task

    response = asyncio.run(end())
    assert response.status_code == 404 and held.is_deleted and agents.app.served.num_open == 0


@pytest.mark.parametrize("bounds", [{"sampling": {"max_tokens": 3}}, {"tokens": 40}])
def test_an_answer_that_its_session_cut_has_not_filled_the_window(agents, bounds):
    made = agents.session(**bounds)
    body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True}
    for stream in (False, True):
        headers = {"x-api-key": made["api_key"]}
        path = f"/sessions/{made['id']}/v1/messages"
        text = agents.send("POST", path, body | {"stream": stream}, headers=headers).text
        assert '"stop_reason":"max_tokens"' in text, text
        made = agents.session(**bounds)


def test_a_short_body_behind_a_long_conversation_is_placed_off_the_event_loop(agents, monkeypatch):
    session = agents.session()
    threads, held = [], agents.held(session)
    place = held.place
    monkeypatch.setattr(
        held, "place", lambda *args, **kwargs: threads.append(threading.current_thread()) or place(*args, **kwargs)
    )
    previous = None
    for _ in range(6):
        body = {"input": "more", "max_output_tokens": 1, "previous_response_id": previous}
        headers = {"x-api-key": session["api_key"]}
        response = agents.send("POST", path_of(session, "/responses"), body, headers=headers)
        assert response.status_code == 200, response.text
        previous = response.json()["id"]
    assert threads[0] is threading.main_thread() and threads[-1] is not threading.main_thread()


def test_an_answer_that_is_kept_for_retries_does_not_keep_its_request():
    class Request:
        """Stands for a body of megabytes."""

    async def run():
        retries, request = Retries(60.0), Request()
        held = weakref.ref(request)

        async def reply(_=request):
            return Reply("answer")

        answer = retries.join(b"key", reply, 0.0)
        assert (await answer.read()).body == "answer"
        retries.leave(b"key", answer, 0.0)
        del request, reply
        gc.collect()
        return len(retries), held()

    assert asyncio.run(run()) == (1, None)


def test_answers_kept_for_copies_take_a_part_of_the_sessions_memory():
    async def run():
        memory = Memory(80_000)
        retries, sizes = Retries(60.0, memory), []

        async def events():
            for _ in range(20):
                yield {"delta": "x" * 100}

        async def stream():
            return Events(events())

        for number in range(12):
            answer = retries.join(b"%d" % number, stream, 0.0)
            async for _ in (await answer.read()).events:
                pass
            await asyncio.sleep(0)
            retries.leave(b"%d" % number, answer, 0.0)
            sizes.append(memory.num_bytes)
        kept = len(retries)
        late = retries.join(b"11", stream, 0.0)
        assert late is answer, "the newest is kept"
        retries.forget_late(61.0)
        retries.leave(b"11", late, 61.0)
        return sizes, kept, memory.num_bytes

    sizes, kept, left = asyncio.run(run())
    assert max(sizes) <= 10_000 and 0 < kept < 12 and left == 0


@pytest.mark.parametrize(
    "api, body",
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_memory_is_refused_in_the_dialects_own_shape(policy, api, body, stream):
    options = ServeOptions(sessions=True, session_bytes=200_000, all_sessions_bytes=300_000)
    agents = Agents(App(policy, options))
    made, other = (agents.post("/sessions", {}) for _ in range(2))

    def send(session, number):
        headers = {"x-api-key": session["api_key"]}
        path = f"/sessions/{session['id']}{api}"
        return agents.send("POST", path, body | {"stream": stream, "seed": number}, headers=headers)

    assert send(made, 0).status_code == 200
    agents.held(made).memory.add(200_000)
    ended = send(made, 1)
    assert ended.status_code == 403 and "session_bytes" in ended.text
    agents.held(other).memory.add(120_000)
    full = send(other, 2)
    assert full.status_code == 503 and full.headers["retry-after"] and "all_sessions_bytes=300000" in full.text
    refused = agents.send("POST", "/sessions", {})
    assert refused.status_code == 503 and "DELETE" in refused.json()["error"]["message"]
    if api == "/v1/messages":
        kinds = ended.json()["error"]["type"], full.json()["error"]["type"]
        assert kinds == ("permission_error", "overloaded_error") and ended.json()["type"] == "error"
    else:
        assert (ended.json()["error"]["code"], full.json()["error"]["code"]) == (403, 503)
    text = agents.send("GET", "/metrics").text
    assert 'rollout_engine_sessions{engine="0"} 2.0' in text
    assert 'rollout_engine_sessions_bytes_limit{engine="0"} 300000.0' in text
    assert 'session_requests_refused_total{bound="bytes",engine="0"} 1.0' in text.replace(
        'engine="0",bound="bytes"', 'bound="bytes",engine="0"'
    )
    held = agents.send("GET", f"/sessions/{made['id']}").json()
    assert held["ended_by"] == "bytes" and held["bytes_left"] == 0
    agents.send("DELETE", f"/sessions/{made['id']}")
    assert send(other, 3).status_code == 200
    agents.send("DELETE", f"/sessions/{other['id']}")
    assert agents.app.served.sessions.registry.memory.num_bytes == 0
