"""The server on a socket: what only a connection can do wrong."""

import gc
import json
import socket
import struct
import threading
import time

import httpx2
import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.version import VERSION
from rollout_engine.serve import generation, http_protocol
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.routes import ROUTES
from rollout_engine.serve.server import HttpServer


@pytest.fixture(scope="module")
def server(policy):
    with HttpServer(policy, ServeOptions(port=0, max_body_bytes=10_000, body_seconds=0.5)) as made:
        yield made


def say(server, data, *, then_closes=True):
    """All that comes back for these bytes, until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        if then_closes:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def head(length, *more):
    lines = [b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-length: %d" % length, *more]
    return b"\r\n".join([*lines, b"", b""])


def test_a_request_is_answered(server):
    response = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert response.status_code == 200 and response.headers["x-weight-version"] == "0"
    assert response.json()["usage"]["completion_tokens"] == 2


def test_a_body_that_is_too_long_is_refused_before_it_is_read(server):
    assert b" 413 " in say(server, head(10_001), then_closes=False).partition(b"\r\n")[0]


def test_a_chunked_body_that_grows_too_long_is_refused(server):
    chunks = b"2710\r\n" + b"x" * 10_000 + b"\r\n" + b"1\r\nx\r\n"
    request = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked") + chunks
    assert b" 413 " in say(server, request, then_closes=False).partition(b"\r\n")[0]


def test_bodies_of_all_connections_have_one_bound(policy):
    options = ServeOptions(port=0, max_body_bytes=10_000_000, max_open_body_bytes=400_000)
    part = b'{"prompt": "' + b"x" * 300_000
    with HttpServer(policy, options) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as first:
            first.sendall(head(350_000) + part)
            while server.app.open_bytes.count < 300_000:
                time.sleep(0.001)
            second = say(server, head(350_000) + part, then_closes=False)
            assert b" 503 " in second.partition(b"\r\n")[0] and b"retry-after" in second
            first.sendall(b"x" * (350_000 - len(part) - 2) + b'"}')
            assert b" 400 " in first.recv(65536).partition(b"\r\n")[0]  # it was read whole: the text is too long
        assert server.app.open_bytes.count == 0


def test_a_body_that_does_not_come_is_not_waited_for(server):
    assert b" 408 " in say(server, head(5) + b"{", then_closes=False).partition(b"\r\n")[0]


def test_a_header_that_is_too_long_is_refused(server):
    endless = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: %b\r\n" % (b"b" * 70_000)
    assert b" 431 " in say(server, endless, then_closes=False).partition(b"\r\n")[0]


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_a_header_that_does_not_come_is_not_waited_for(server, monkeypatch, before):
    monkeypatch.setattr(http_protocol, "_HEADER_SECONDS", 0.2)
    assert b"HTTP/1.1 408" in say(server, before + b"GET /health HTTP/1.1\r\nhost:", then_closes=False)


def test_what_is_no_http_is_refused_as_any_other_error(server):
    first, _, rest = say(server, b"\x16\x03\x01 hello\r\n\r\n", then_closes=False).partition(b"\r\n")
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert b" 400 " in first and error["code"] == 400 and error["message"]


def test_text_that_is_not_utf_8_is_no_json(server):
    response = httpx2.post(f"{server.url}/v1/completions", content=b'{"prompt": "\xff"}')
    assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"]


def test_a_client_that_asks_for_another_protocol_is_answered_and_left(server):
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    assert say(server, request * 2, then_closes=False).count(b"HTTP/1.1 200") == 1


def test_a_client_that_leaves_while_its_prompt_is_encoded_leaves_nothing(server, policy, monkeypatch):
    frontend = server.app.served.engine.frontend
    add, has_come, may_add, added = frontend.add_request, *(threading.Event() for _ in range(3))

    def add_late(*arguments, **options):
        has_come.set()
        may_add.wait(30)
        streams = add(*arguments, **options)
        added.set()
        return streams

    monkeypatch.setattr(frontend, "add_request", add_late)
    monkeypatch.setattr(generation, "MANY_BYTES", 0)  # from here on prompts are encoded on a thread
    policy.pause_generation(mode="keep")
    body = b'{"prompt": "x", "max_tokens": 3}'
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head(len(body)) + body)
        assert has_come.wait(30)
    state = server._server.server_state
    while state.tasks:
        time.sleep(0.001)
    may_add.set()
    assert added.wait(30)
    while policy.get_num_unfinished_requests():
        time.sleep(0.001)
    policy.resume_generation()


def test_a_connection_that_is_reset_is_kept_by_no_timer(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        [kept] = [each for each in gc.get_objects() if _waits_for_a_request(each)]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
    while kept in kept.connections:
        time.sleep(0.001)
    assert kept._timer is None


def _waits_for_a_request(value):
    return issubclass(type(value), http_protocol.HttpConnection) and value._timer is not None


def test_connections_beyond_the_most_are_refused_in_the_shape_of_the_dialect(policy):
    with HttpServer(policy, ServeOptions(port=0, max_connections=1)) as full, httpx2.Client() as first:
        assert first.get(f"{full.url}/health").status_code == 200
        for path, is_sglang in (("/v1/completions", False), ("/generate", True)):
            refused = httpx2.post(f"{full.url}{path}", json={})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
            error = refused.json()["error"]
            assert error["type"] == "ServiceUnavailableError" and "max_connections=1" in error["message"]
            assert ("success" in refused.json()) == is_sglang
        assert first.get(f"{full.url}/health").status_code == 200  # who was there before stays
        first.close()
        while httpx2.get(f"{full.url}/health").status_code == 503:
            time.sleep(0.001)


def test_requests_that_outlast_a_stopped_server_are_told(policy, caplog):
    policy.pause_generation(mode="keep")
    with HttpServer(policy, ServeOptions(port=0, drain_seconds=0.5)) as server, httpx2.Client(timeout=60) as client:
        url, found = f"{server.url}/v1/completions", []
        thread = threading.Thread(target=lambda: found.append(client.post(url, json={"prompt": "x"})))
        thread.start()
        while not server.app.served.num_open:
            time.sleep(0.001)
        server.stop()
        thread.join()
    policy.resume_generation()
    assert found[0].status_code == 503 and "has stopped" in found[0].json()["error"]["message"]
    assert "the application failed" not in caplog.text


def test_streams_that_outlast_a_stopped_server_end_with_its_error(policy, caplog):
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "n": 16, "stream": True}
    with HttpServer(policy, ServeOptions(port=0, drain_seconds=0.5)) as server, httpx2.Client(timeout=60) as client:
        with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            policy.pause_generation(mode="keep")
            server.stop()
            *_, error, done = [line.removeprefix("data: ") for line in lines if line]
    policy.resume_generation()
    assert "has stopped" in json.loads(error)["error"]["message"] and done == "[DONE]"
    assert "the application failed" not in caplog.text


def test_an_address_in_use_is_named(server, policy):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port={port} cannot be listened on"):
        HttpServer(policy, ServeOptions(port=port))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"host": "0.0.0.0"}, "no --api-key and no --admin-key"),
        ({"host": "0.0.0.0", "api_key": "a"}, "there is no --admin-key"),
        ({"api_key": "a", "admin_key": "a"}, "are the same"),
        ({"api_key": ""}, "api_key is not allowed"),
        ({"prot": 1}, "port"),
    ],
)
def test_options_that_are_not_safe_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ServeOptions(**options)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/model", "Did you mean '/v1/models'?"),
        ("/chat/completions", "Did you mean '/v1/chat/completions'?"),
        ("/", "GET /v1/models says what is served."),
    ],
)
def test_a_route_that_is_not_there_names_one_that_is(server, path, told):
    response = httpx2.get(f"{server.url}{path}")
    assert response.status_code == 404 and told in response.json()["error"]["message"]


def test_a_model_that_is_not_served_is_told_what_is(server):
    body = {"model": "gpt-4", "prompt": "x", "max_tokens": 1}
    said = httpx2.post(f"{server.url}/v1/completions", json=body).json()["error"]["message"]
    assert "Give one of these, or leave model out" in said


def test_a_field_without_its_first_word_is_known(server):
    body = {"lora_name": "math", "path": "/nowhere"}
    said = httpx2.post(f"{server.url}/v1/load_lora_adapter", json=body).json()["error"]["message"]
    assert said.endswith("Unknown field 'path'. Did you mean 'lora_path'?")


def test_the_routes_are_an_openapi_document(server):
    document = httpx2.get(f"{server.url}/openapi.json").json()
    assert document["openapi"] == "3.1.0" and document["info"]["version"] == VERSION
    operation = document["paths"]["/v1/completions"]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "prompt" in document["components"]["schemas"][name]["properties"]
    assert {(path, method.upper()) for path, found in document["paths"].items() for method in found} == {
        (row.path, method) for row in ROUTES for method in row.methods
    }


def test_the_version_and_readiness_are_told(server):
    assert httpx2.get(f"{server.url}/version").json() == {"version": VERSION}
    assert httpx2.get(f"{server.url}/readiness").status_code == 200
