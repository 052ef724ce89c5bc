"""Sessions of agents over HTTP: keys, paths, retries, clients that leave, budgets, and strangers."""

import asyncio
import json
import random

import httpx2
import pytest

from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions

from .conftest import Client

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"messages": HELLO, "max_tokens": 4, "seed": 1, "ignore_eos": True}


class Agents(Client):
    """An application with sessions, and requests to them."""

    def session(self, **fields):
        return self.post("/sessions", fields, headers={"x-api-key": "client-key"})

    def chat(self, session, body=CHAT, **options):
        key = options.pop("key", session["api_key"])
        return self.send("POST", path_of(session), body, headers={"authorization": f"Bearer {key}"}, **options)

    def held(self, session):
        """The session itself."""
        return self.app.served.sessions.registry.find(session["id"])

    def rows(self, session):
        response = self.send("GET", f"/sessions/{session['id']}/rows", headers={"x-api-key": "client-key"})
        assert response.status_code == 200, response.text
        return response.json()["rows"]


def path_of(session, api="/chat/completions"):
    return session["openai_base_url"].removeprefix("http://localhost") + api


@pytest.fixture(scope="module")
def agents(policy):
    return Agents(App(policy, ServeOptions(sessions=True, api_key="client-key", admin_key="admin-key")))


@pytest.fixture
def session(agents):
    made = agents.session()
    yield made
    agents.send("DELETE", f"/sessions/{made['id']}", headers={"x-api-key": "client-key"})


def test_rows_are_what_the_client_was_answered(agents, session):
    more = {"logprobs": True, "return_token_ids": True}
    first = agents.chat(session, CHAT | more).json()["choices"][0]
    messages = [*HELLO, first["message"], {"role": "user", "content": "and?"}]
    second = agents.chat(session, CHAT | more | {"messages": messages}).json()["choices"][0]
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    [row] = agents.rows(session)
    assert (row["began"], row["parent_row"], row["reward"]) == ("start", -1, None)
    assert row["prompt_token_ids"] == first["prompt_token_ids"]
    for choice, sample in zip((first, second), row["samples"], strict=True):
        span = slice(sample["start"], sample["start"] + sample["num_tokens"])
        assert row["response_token_ids"][span] == choice["token_ids"] and all(row["mask"][span])
        assert row["logprobs"][span] == [each["logprob"] for each in choice["logprobs"]["content"]]
        assert sample["version_spans"] == choice["version_spans"] and sample["seed"] == choice["seed"]
    assert sum(row["mask"]) == 8 and row["messages"][-1]["content"] == second["message"]["content"]


def test_a_stream_is_recorded_as_a_whole_answer_is(agents, session):
    body = CHAT | {"stream": True, "logprobs": True, "return_token_ids": True, "n": 2}
    response = agents.chat(session, body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for row in agents.rows(session):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == row["row"]]
        assert row["response_token_ids"] == [each for choice in choices for each in choice["token_ids"]]
        said = [each["logprob"] for choice in choices for each in choice["logprobs"]["content"]]
        assert row["logprobs"] == said and row["samples"][0]["version_spans"] == [[0, 4, 0, 0]]
    assert [row["began"] for row in agents.rows(session)] == ["start", "sample"]


def test_a_key_opens_its_session_alone(agents, session):
    other = agents.session()
    texts = set()
    for key in (other["api_key"], "client-key", "admin-key", "", session["api_key"][:-1]):
        response = agents.chat(session, key=key)
        assert response.status_code == 404
        texts.add(response.json()["error"]["message"])
    unknown = {**session, "openai_base_url": f"http://localhost/sessions/{'x' * 22}/v1"}
    texts.add(agents.chat(unknown).json()["error"]["message"])
    assert len(texts) == 1, "an answer does not show whether there is such a session"
    headers = {"authorization": f"Bearer {session['api_key']}"}
    for method, path in (
        ("POST", "/sessions"),
        ("GET", f"/sessions/{session['id']}"),
        ("GET", f"/sessions/{session['id']}/rows"),
        ("POST", f"/sessions/{session['id']}/reward"),
        ("DELETE", f"/sessions/{session['id']}"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/pause"),
    ):
        assert agents.send(method, path, {}, headers=headers).status_code == 401, path
    assert not agents.rows(session) and not agents.rows(other)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/pause", "/v1/../../pause", "/v1/chat/completions/x", "/generate"]
)
def test_other_routes_are_not_below_a_session(agents, session, path):
    headers = {"authorization": f"Bearer {session['api_key']}"}
    base = session["anthropic_base_url"].removeprefix("http://localhost")
    assert agents.send("POST", base + path, {}, headers=headers).status_code in (401, 404, 405)


def test_the_replica_that_has_a_sessions_kv_is_preferred(agents, session, monkeypatch):
    frontend, found = agents.app.served.engine.frontend, []
    add_request = frontend.add_request

    def note_session(*args, **options):
        found.append(options["session_id"])
        return add_request(*args, **options)

    monkeypatch.setattr(frontend, "add_request", note_session)
    agents.chat(session)
    assert found == [session["id"]]


def test_any_name_of_a_model_is_served_in_a_session(agents, session):
    assert agents.chat(session, CHAT | {"model": "gpt-5"}).json()["model"] == agents.app.served.model
    headers = {"authorization": "Bearer dummy", "x-api-key": session["api_key"]}
    assert agents.send("POST", path_of(session), CHAT, headers=headers).status_code == 200


def test_models_are_listed_below_a_session(agents, session):
    headers = {"x-api-key": session["api_key"]}
    assert agents.send("GET", path_of(session, "/models"), headers=headers).json()["data"]


def test_copies_of_a_request_are_answered_once(agents, session):
    reordered = dict(reversed(CHAT.items()))

    async def send_copies():
        transport = httpx2.ASGITransport(agents.app)
        headers = {"authorization": f"Bearer {session['api_key']}"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            bodies = [CHAT, reordered, CHAT]
            first = await asyncio.gather(*(client.post(path_of(session), json=body) for body in bodies))
            later = await client.post(path_of(session), json=reordered)
            others = [
                await client.post(path_of(session), json=CHAT | {"seed": 2}),
                await client.post(path_of(session), json=CHAT, headers={"idempotency-key": "another"}),
            ]
            return [*first, later], others

    copies, others = asyncio.run(send_copies())
    assert len({response.json()["id"] for response in copies}) == 1
    assert len({response.text for response in copies}) == 1 and agents.held(session).num_turns == 3
    assert all(response.status_code == 200 for response in others)


def test_equal_requests_that_are_first_attempts_are_answered_each(agents, session):
    async def send_attempts():
        transport = httpx2.ASGITransport(agents.app)
        headers = {"authorization": f"Bearer {session['api_key']}"}
        body = {name: value for name, value in CHAT.items() if name != "seed"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:

            async def attempt(number):
                header = {"x-stainless-retry-count": number}
                return (await client.post(path_of(session), json=body, headers=header)).json()

            first = await asyncio.gather(*(attempt("0") for _ in range(3)))
            return first, [await attempt("1"), await attempt("2")], await attempt("0")

    first, copies, last = asyncio.run(send_attempts())
    assert len({each["id"] for each in [*first, last]}) == 4 and agents.held(session).num_turns == 4
    assert [each["id"] for each in copies] == [first[-1]["id"]] * 2, "copies get the newest answer"
    assert [row["began"] for row in agents.rows(session)] == ["start", "parallel", "parallel", "rollback"]
    assert len(agents.app.served.sessions._retries[session["id"]]) == 1


def test_a_streamed_answer_is_repeated_as_it_was(agents, session):
    body = CHAT | {"stream": True}
    first, again = agents.chat(session, body).text, agents.chat(session, body).text
    assert first == again and first.count("data: ") >= 2 and agents.held(session).num_turns == 1


def test_a_request_that_failed_is_tried_again(agents, session):
    body = CHAT | {"allowed_token_ids": [10**6]}  # refused once its place in the session is found
    assert [agents.chat(session, body).status_code for _ in range(2)] == [400, 400]
    assert agents.held(session).num_begun == 2 and agents.held(session).num_open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(agents, session, stream):
    async def leave():
        left = asyncio.Event()
        body = json.dumps(CHAT | {"max_tokens": 200, "stream": stream}).encode()
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        headers = [(b"x-api-key", session["api_key"].encode()), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": path_of(session), "headers": headers, "query_string": b""}

        async def receive():
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        task = asyncio.ensure_future(agents.app(scope, receive, send))
        while not agents.held(session).num_open:
            await asyncio.sleep(0.001)
        left.set()
        await task
        while agents.held(session).num_open or agents.app.served.num_open:
            await asyncio.sleep(0.001)

    asyncio.run(leave())
    assert agents.held(session).num_turns == 0 and not agents.rows(session)
    assert agents.chat(session).status_code == 200


def test_deleting_a_session_ends_its_requests(agents):
    session = agents.session()
    held = agents.held(session)

    async def delete():
        transport = httpx2.ASGITransport(agents.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {session['api_key']}"}
            task = asyncio.ensure_future(
                client.post(path_of(session), json=CHAT | {"max_tokens": 200}, headers=headers)
            )
            while not held.num_open:
                await asyncio.sleep(0.001)
            gone = await client.delete(f"/sessions/{session['id']}", headers={"x-api-key": "client-key"})
            return gone.status_code, (await task)

    status, response = asyncio.run(delete())
    assert status == 200 and response.status_code == 404 and "deleted" in response.json()["error"]["message"]
    assert agents.chat(session).status_code == 404 and held.num_turns == 0
    assert agents.app.served.num_open == 0


def test_a_session_forces_its_sampling_and_its_budget(agents):
    session = agents.session(sampling={"temperature": 0, "seed": 5}, tokens=60, group_id="task")
    body = {"messages": HELLO, "temperature": 1.5, "max_tokens": 500, "ignore_eos": True, "return_token_ids": True}
    choice = agents.chat(session, body).json()["choices"][0]
    assert len(choice["prompt_token_ids"]) + len(choice["token_ids"]) == 60 and choice["finish_reason"] == "length"
    response = agents.chat(session, body | {"messages": [*HELLO, choice["message"], *HELLO]})
    assert response.status_code == 403 and "60 tokens are used up" in response.json()["error"]["message"]
    found = agents.send("GET", f"/sessions/{session['id']}", headers={"x-api-key": "client-key"}).json()
    assert found["ended_by"] == "tokens" and found["num_tokens"] == 60 and found["group_id"] == "task"
    greedy = agents.session(sampling={"temperature": 0})
    said = agents.chat(greedy, body | {"max_tokens": len(choice["token_ids"])}).json()["choices"][0]
    assert said["token_ids"] == choice["token_ids"], "temperature 0 for both"
    for made in (session, greedy):
        agents.send("DELETE", f"/sessions/{made['id']}", headers={"x-api-key": "client-key"})


def test_a_seed_of_a_session_replays_it(agents):
    def play():
        session = agents.session(sampling={"seed": 9})
        choices, messages = [], HELLO
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 6, "return_token_ids": True}
            choices.append(agents.chat(session, body).json()["choices"][0])
            messages = [*messages, choices[-1]["message"], *HELLO]
        agents.send("DELETE", f"/sessions/{session['id']}", headers={"x-api-key": "client-key"})
        return [(choice["seed"], choice["token_ids"]) for choice in choices]

    first, second = play(), play()
    assert first == second and first[0][0] != first[1][0]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"sampling": {"n": 2}}, "sampling['n']"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"seconds": 1e9}, "seconds"),
        ({"tokens": 0}, "tokens"),
        ({"other": 1}, "other"),
    ],
)
def test_a_session_that_cannot_be_is_refused(agents, fields, said):
    assert said in agents.problem("/sessions", fields, headers={"x-api-key": "client-key"})["message"]


@pytest.mark.parametrize(
    "more, said",
    [
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_request_that_would_break_the_rows_is_refused(agents, session, more, said):
    response = agents.chat(session, CHAT | more)
    assert response.status_code == 400 and said in response.json()["error"]["message"]
    if said == "truncate_prompt_tokens":
        assert "send fewer messages" in response.json()["error"]["message"]
    assert agents.held(session).num_open == 0


def test_rewards_are_set_by_the_owner(agents, session):
    agents.chat(session)
    keys, path = {"x-api-key": "client-key"}, f"/sessions/{session['id']}/reward"
    assert agents.post(path, {"reward": 0.25}, headers=keys) == {"success": True}
    assert agents.rows(session)[0]["reward"] == 0.25
    agents.post(path, {"reward": 2, "row": 0}, headers=keys)
    assert agents.rows(session)[0]["reward"] == 2.0
    for body in ({"reward": 1, "row": 7}, {"reward": "x"}, {}):
        agents.problem(path, body, headers=keys)


def test_without_sessions_their_routes_say_how_to_get_them(client):
    for method, path in (("POST", "/sessions"), ("GET", "/sessions/x"), ("POST", "/sessions/x/v1/chat/completions")):
        body = {"messages": HELLO} if path.endswith("completions") else None
        assert "--sessions" in client.problem(path, body, status=404, method=method)["message"]


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models", "/rows", "/reward", "", "/x", "/v1"]
BODIES = [b"", b"{", b"[]", b"{}", b'{"messages": 1}', b'{"messages": [{}]}', b"\xff\xfe", b"[" * 5_000]


def hostile(draw, session):
    """A request that nothing should come of: by a wrong key, or broken."""
    session_id = draw.choice([session["id"], session["id"][:-1], "", "%00", "..", "x" * 500, "{id}"])
    key = draw.choice([session["api_key"], session["api_key"].lower(), "", "client", "\xff", "k" * 5_000])
    body = draw.choice(BODIES)
    if draw.random() < 0.5:
        broken = draw.choice([{"max_tokens": -1}, {"no_such_field": 1}, {"messages": [{"role": 1}]}, {"n": 10**9}])
        body = json.dumps(CHAT | broken).encode()
    name = draw.choice([b"authorization", b"x-api-key"])
    value = key.encode("latin-1") if name == b"x-api-key" else b"Bearer " + key.encode("latin-1")
    return {
        "type": "http",
        "method": draw.choice(["POST", "POST", "GET", "PUT", "OPTIONS", "HEAD"]),
        "path": f"/sessions/{session_id}{draw.choice(PATHS)}",
        "headers": [(name, value), (b"host", b"localhost")],
        "query_string": draw.choice([b"", b"", b"max_tokens=x", b"beta=true"]),
    }, body


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_requests_leave_nothing_behind(agents, session, count):
    draw, statuses = random.Random(11), set()
    agents.chat(session)
    sessions = agents.app.served.sessions
    before, num_sessions = json.dumps(agents.rows(session)), len(sessions.registry)

    async def send_all():
        async def receive_from(parts):
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message):
            statuses.add(message.get("status"))

        for _ in range(count):
            scope, body = hostile(draw, session)
            parts = [{"type": "http.request", "body": body, "more_body": False}]
            await agents.app(scope, lambda parts=parts: receive_from(parts), send)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(send_all()) == 1
    held = agents.held(session)
    assert statuses - {None} <= {200, 400, 401, 403, 404, 405} and len(sessions.registry) == num_sessions
    assert json.dumps(agents.rows(session)) == before and held.num_open == 0 and agents.app.served.num_open == 0
    assert agents.app.open_bytes.count == 0 and all(len(kept) <= 1 for kept in sessions._retries.values())
    assert len(sessions._forced) <= 64
