"""Bounds of sessions over HTTP: late ends, answers that a session cuts, and long conversations behind short bodies."""

import asyncio
import gc
import threading
import weakref

import httpx2
import pytest

from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.route import Reply
from rollout_engine.serve.sessions.retries import Retries

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
