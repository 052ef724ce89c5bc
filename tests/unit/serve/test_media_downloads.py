"""Pictures are downloaded from allowed hosts alone, bounded in size and time, whatever a host answers."""

import asyncio
import socket

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.media import downloads
from rollout_engine.serve.media.downloads import download
from rollout_engine.serve.media.hosts import AllowedHosts
from rollout_engine.serve.problems import HttpProblem

FIELD, PICTURE, MOST = "image_data[0]", b"\x89PNG" + bytes(200), 4096
OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
CHUNK = b"64\r\n" + bytes(100) + b"\r\n"
ANSWERS = {
    "/length": OK + b"Content-Length: %d\r\n\r\n" % len(PICTURE) + PICTURE + b"more",
    "/closed": OK + b"\r\n" + PICTURE,
    "/chunked": OK + b"Transfer-Encoding: chunked\r\n\r\ncc\r\n" + PICTURE + b"\r\n0\r\n\r\n",
    "/hints": b"HTTP/1.1 103 Early Hints\r\nContent-Length: 99\r\n\r\n" + OK + b"\r\n" + PICTURE,
    "/store": OK.replace(b"image/png", b"binary/octet-stream") + b"\r\n" + PICTURE,
    "/moved": b"HTTP/1.1 302 Found\r\nLocation: length\r\nContent-Length: 9999999\r\n\r\n",
    "/html": OK.replace(b"image/png", b"text/html; charset=utf-8") + b"\r\n<secret>",
    "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\nsecret",
    "/broken": b"HTTP/1.1 500 No\r\n\r\nsecret",
    "/short": OK + b"Content-Length: 999\r\n\r\n" + PICTURE,
    "/short-chunk": OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\n" + PICTURE,
    "/long": OK + b"Content-Length: 999999999999\r\n\r\n",
    "/long-body": OK + b"\r\n" + bytes(MOST + 1),
    "/endless": [OK + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK],
    "/header": [OK, b"X-Many: " + b"a" * 1000 + b"\r\n"],
    "/zipped": OK + b"Content-Encoding: gzip\r\n\r\n" + PICTURE,
    "/garbage": b"SSH-2.0-OpenSSH_9.2\r\n",
    "/nothing": b"",
    "/loop": b"HTTP/1.1 301 Moved\r\nLocation: /loop\r\n\r\n",
    "/to-private": b"HTTP/1.1 302 Found\r\nLocation: http://localhost/secret\r\n\r\n",
    "/to-metadata": b"HTTP/1.1 302 Found\r\nLocation: //169.254.169.254/latest\r\n\r\n",
    "/to-file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
    "/silent": None,
    "/slow": [OK, None],
}
"""Path -> what the host sends: bytes, or bytes and others again and again; None: nothing, and it does not close."""


class Host:
    """A host of pictures, on a port of this machine."""

    def __init__(self):
        self.heads: list[bytes] = []
        self.num_open = 0

    async def answer(self, reader, writer):
        self.num_open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            answer = ANSWERS[head.split()[1].decode()]
            first, again = answer if isinstance(answer, list) else (answer, b"")
            writer.write(first or b"")
            while again:
                writer.write(again)
                await writer.drain()
            if first is None or again is None:
                await reader.read()
        except ConnectionError:
            pass
        finally:
            self.num_open -= 1
            writer.close()


def fetch(path, *, host="127.0.0.1", allowed=("127.0.0.1:{port}",), seconds=5.0):
    """(the picture at a path of the host, the host, the bytes counted)."""
    counted, served = [], Host()

    async def run():
        server = await asyncio.start_server(served.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        hosts = AllowedHosts([each.format(port=port) for each in allowed])
        options = {"most": MOST, "seconds": seconds, "count": counted.append}
        try:
            return await download(f"http://{host}:{port}{path}", hosts, FIELD, **options)
        finally:
            server.close()
            async with asyncio.timeout(5):
                while served.num_open:
                    await asyncio.sleep(0.01)

    return asyncio.run(run()), served, counted


@pytest.mark.parametrize("path", ["/length", "/closed", "/chunked", "/hints", "/store", "/moved"])
def test_a_picture_is_downloaded_however_its_host_ends_it(path):
    found, host, counted = fetch(path)
    assert found == PICTURE and sum(counted) == len(PICTURE)
    assert b"\r\nHost: 127.0.0.1:" in host.heads[0] and len(host.heads) == (2 if path == "/moved" else 1)


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/html", 400, "must be the URL of a picture"),
        ("/missing", 400, "answers with status 404"),
        ("/broken", 502, "answers with status 500"),
        ("/short", 502, "has closed the connection"),
        ("/short-chunk", 502, "has closed the connection"),
        ("/long", 413, "4096 bytes"),
        ("/long-body", 413, "4096 bytes"),
        ("/endless", 413, "4096 bytes"),
        ("/header", 502, "too long a header"),
        ("/zipped", 502, "a content encoding, unasked"),
        ("/garbage", 502, "does not answer by HTTP/1.1"),
        ("/nothing", 502, "has closed the connection"),
        ("/loop", 502, "redirects more than 3 times"),
        ("/to-private", 400, "a URL of localhost:80"),
        ("/to-metadata", 400, "a URL of 169.254.169.254:80"),
        ("/to-file", 400, "must be a URL"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_its_part(path, status, told):
    with pytest.raises((RequestError, HttpProblem)) as refusal:
        fetch(path)
    problem = refusal.value
    assert told in str(problem) and problem.field == FIELD and FIELD in str(problem)
    assert getattr(problem, "status", 400) == status and "secret" not in str(problem).replace("/secret", "")


def test_a_host_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        HttpProblem, match=rf"the host {place} cannot be connected to \(ConnectionRefusedError\)"
    ) as gone:
        options = dict(most=MOST, seconds=5, count=print)
        asyncio.run(download(f"http://{place}/a", AllowedHosts([place]), FIELD, **options))
    assert gone.value.status == 502


@pytest.mark.parametrize("path", ["/silent", "/slow"])
def test_a_host_that_does_not_answer_is_given_up(path):
    with pytest.raises(
        HttpProblem, match=r"image_data\[0\]: the host .* has not sent the picture within 0.2 s"
    ) as late:
        fetch(path, seconds=0.2)
    assert late.value.status == 504


def resolve_to(monkeypatch, *addresses):
    """Have every name lead to these addresses, the first time; later to this machine."""
    calls = []

    def getaddrinfo(host, port, *_, **__):
        calls.append(host)
        found = addresses if len(calls) == 1 else ("127.0.0.1",)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(downloads.socket, "getaddrinfo", getaddrinfo)
    return calls


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::1"], ["169.254.169.254"]])
def test_an_allowed_name_that_leads_into_the_private_network_is_not_connected_to(monkeypatch, addresses):
    resolve_to(monkeypatch, *addresses)
    monkeypatch.setattr(downloads.asyncio, "open_connection", None)
    with pytest.raises(RequestError, match="which leads to"):
        fetch("/length", host="images.example.org", allowed=["images.example.org:{port}"])


def test_a_name_may_lead_to_a_listed_address_and_is_resolved_once(monkeypatch):
    calls = resolve_to(monkeypatch, "127.0.0.1")
    found, host, _ = fetch("/length", host="images.example.org", allowed=["images.example.org:{port}", "127.0.0.0/8"])
    assert found == PICTURE and b"Host: images.example.org:" in host.heads[0] and calls == ["images.example.org"]
