"""HTTP/1.1 as clients speak it on a connection."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from rollout_engine.serve import http_protocol
from rollout_engine.serve.http_exchange import EXCHANGE, HttpExchange
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer

LAST = b"connection: close"


@pytest.fixture(scope="module")
def server(policy):
    with HttpServer(policy, ServeOptions(port=0)) as made:
        made._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # connections have it from there
        yield made


@pytest.fixture
def connect(server):
    """Makes connections, which end with the test."""
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection((host, int(port)), timeout=60))


@pytest.fixture
def connection(connect):
    return connect()


@contextmanager
def paused(policy):
    policy.pause_generation(mode="keep")
    try:
        yield
    finally:
        policy.resume_generation()


def request(method, path, body=None, *lines, version=b"1.1"):
    data = b"" if body is None else json.dumps(body).encode()
    head = [b"%b %b HTTP/%b" % (method, path, version), b"host: localhost", b"content-length: %d" % len(data), *lines]
    return b"\r\n".join([*head, b"", data])


def until_closed(connection):
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_pipelined_requests_are_answered_in_their_order(connection):
    named = [request(b"GET", b"/health", None, b"x-request-id: n%d" % i) for i in range(5)]
    slow = request(b"POST", b"/v1/completions", {"prompt": "x", "max_tokens": 20}, b"x-request-id: slow")
    connection.sendall(slow + b"".join(named) + request(b"GET", b"/nowhere", None, LAST))
    answers = until_closed(connection).split(b"HTTP/1.1 ")[1:]
    ids = [answer.partition(b"x-request-id: ")[2].partition(b"\r\n")[0] for answer in answers]
    assert ids[:-1] == [b"slow", *(b"n%d" % i for i in range(5))] and answers[-1].startswith(b"404 ")


def test_a_client_that_waits_for_leave_gets_it_before_it_sends_its_body(connection):
    whole = request(b"POST", b"/v1/completions", {"prompt": "x", "max_tokens": 2}, b"expect: 100-continue", LAST)
    head, _, body = whole.partition(b"\r\n\r\n")
    connection.sendall(head + b"\r\n\r\n")
    assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert until_closed(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_client_that_waits_for_leave_is_refused_without_it(connection):
    connection.sendall(request(b"POST", b"/nowhere", {}, b"expect: 100-continue", LAST).partition(b"{}")[0])
    assert until_closed(connection).startswith(b"HTTP/1.1 404 ")


def test_a_head_has_the_length_of_the_answer_and_no_body(connection):
    connection.sendall(request(b"GET", b"/health") + request(b"HEAD", b"/health", None, LAST))
    whole, head = until_closed(connection).split(b"HTTP/1.1 ")[1:]
    assert head.endswith(b"\r\n\r\n") and head.count(b"\r\n\r\n") == 1
    length = [line for line in whole.split(b"\r\n") if line.startswith(b"content-length")]
    assert length and length[0] in head


def test_a_body_that_nobody_reads_does_not_end_the_connection(connection):
    connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n" + bytes(100_000))
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
    connection.sendall(bytes(200_000) + request(b"GET", b"/health", None, LAST))
    assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_a_stream_of_http_1_0_has_no_chunks_and_ends_with_the_connection(connection):
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    connection.sendall(request(b"POST", b"/v1/completions", body, version=b"1.0"))
    head, _, events = until_closed(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_a_stream_waits_for_a_client_that_reads_slowly_and_loses_nothing(connection, monkeypatch):
    waits, wait = [], http_protocol.HttpConnection.wait_until_written

    async def counted(self):
        waits.append(self)
        await wait(self)

    monkeypatch.setattr(http_protocol.HttpConnection, "wait_until_written", counted)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "n": 4, "stream": True, "logprobs": 5}
    connection.sendall(request(b"POST", b"/v1/completions", body, LAST))
    while not waits:
        time.sleep(0.01)
    answer = until_closed(connection)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and answer.count(b'"finish_reason":"length"') == 4


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_only_its_sending_side_is_answered(connection, policy, version, stream):
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": stream}
    policy.pause_generation(mode="keep")
    connection.sendall(request(b"POST", b"/v1/completions", body, version=version))
    connection.shutdown(socket.SHUT_WR)
    interim = connection.recv(1 << 16) if version == b"1.1" else b""
    policy.resume_generation()
    answer = until_closed(connection)
    head, _, rest = (interim + answer).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").partition(b"\r\n\r\n")
    assert interim.startswith(b"HTTP/1.1 100 ") == (version == b"1.1") and b" 100 " not in head
    assert head.startswith(b"HTTP/1.1 200 ") and b'"finish_reason":"length"' in rest


def test_a_client_that_closes_only_its_sending_side_has_all_its_answers(connection):
    connection.sendall(request(b"POST", b"/v1/completions", {"prompt": "x"}) + request(b"GET", b"/nowhere"))
    connection.shutdown(socket.SHUT_WR)
    answers = [part[:3] for part in until_closed(connection).split(b"HTTP/1.1 ")[1:]]
    assert [status for status in answers if status != b"100"] == [b"200", b"404"]


def test_a_client_that_closes_its_sending_side_within_a_request_is_left(connection):
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
    connection.shutdown(socket.SHUT_WR)
    assert until_closed(connection) == b""


@pytest.mark.quick(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [b"", request(b"GET", b"/health")])
@pytest.mark.parametrize("half_first", [False, True])
@pytest.mark.parametrize("padding", ["", " " * 100_000], ids=["small", "large"])
def test_a_client_that_leaves_aborts_its_requests(server, connection, policy, stream, behind, half_first, padding):
    with paused(policy):
        body = {"prompt": "x", "stream": stream, "user": padding}
        connection.sendall(request(b"POST", b"/v1/completions", body) + behind)
        if half_first:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        while not policy.get_num_unfinished_requests():
            time.sleep(0.001)
        connection.close()
        while policy.get_num_unfinished_requests() or server.app.served.num_open:
            time.sleep(0.001)


def test_a_client_that_leaves_a_stream_that_has_begun_aborts_it(server, connect, policy):
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "n": 64, "stream": True}
    num_open = 0
    while not num_open:  # on a busy machine all may be sampled before the pause
        connection = connect()
        connection.sendall(request(b"POST", b"/v1/completions", body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        connection.shutdown(socket.SHUT_WR)
        with paused(policy):
            connection.close()
            num_open = policy.get_num_unfinished_requests()
            sampled = policy.get_metrics().core.counters.num_tokens_sampled
    while policy.get_num_unfinished_requests() or server.app.served.num_open:
        time.sleep(0.001)
    assert policy.get_metrics().core.counters.num_tokens_sampled < sampled + 64 * 200


def test_a_target_that_is_no_path_is_refused(connection):
    connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert until_closed(connection).startswith(b"HTTP/1.1 400 ")


def test_no_header_of_an_answer_can_begin_another_line():
    exchange = HttpExchange(SimpleNamespace(is_full=False), "GET", "1.1", keep_alive=True, expects_continue=False)
    start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b\r\nset-cookie: c")]}
    with pytest.raises(ValueError, match="line break"):
        asyncio.run(exchange.send(start))


@pytest.mark.quick(2)
@pytest.mark.parametrize("field", ["extra_args", "stop", "prompt"])
def test_a_body_that_is_nested_to_any_depth_is_refused(client, field):
    for depth in range(900, 1010):  # from some depth on it cannot be decoded, and just below it nothing else be done
        data = b'{"prompt": "x", "%b": %b%b}' % (field.encode(), b"[" * depth, b"]" * depth)
        response = client.send("POST", "/v1/completions", content=data)
        assert response.status_code == 400 and response.json()["error"]["message"], (depth, response.text)


def test_a_request_whose_client_left_before_its_task_began_is_not_queued(server, policy):
    exchange = HttpExchange(SimpleNamespace(is_full=False), "POST", "1.1", keep_alive=True, expects_continue=False)
    exchange.add_body(b'{"prompt": "x", "max_tokens": 250, "ignore_eos": true}')
    exchange.end_body()
    exchange.disconnect()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope |= {"headers": [(b"content-length", b"54")], "extensions": {EXCHANGE: exchange}}
    sampled = policy.get_metrics().core.counters.num_tokens_sampled
    asyncio.run(server.app(scope, exchange.receive, exchange.send))
    assert policy.get_metrics().core.counters.num_tokens_sampled == sampled and not exchange.has_begun
