"""Random requests to the HTTP server: right ones, wrong ones, and bytes that are no request at all."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from rollout_engine.serve.route import Access, Route
from rollout_engine.serve.routes import ROUTES

API_KEY, ADMIN_KEY = "key-of-clients", "key-of-admins"
MAX_BODY_BYTES = 200_000
BODY_SECONDS = 0.5

PROMPT = [5, 6, 7]
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4, "seed": 3, "return_token_ids": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 3},
    "/v1/responses": {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 4, "seed": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 3, "logprobs": 1}},
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "sampling_seed": 3}},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": PROMPT},
    "/collective_rpc": {"method": "no_such_method", "args": [1]},
    "/weight_checker": {"action": "checksum"},
}
"""What some routes can answer; others get fields of theirs with anything in them."""
STREAMED = [path for path in _BODIES if any(row.path == path and row.verb == "generate" for row in ROUTES)]
_PINNED: dict[str, dict[str, Any]] = {"/init_weights_update_group": {"backend": "carrier pigeons"}}
"""Fields that are always sent so: else a request might wait, as it must, for a trainer that never comes."""
_LEFT_ALONE = ("/start_profile",)
"""Routes that are called without their key only: this one writes files wherever it is told."""
_WHOLE_ONLY = ("/init_weight_transfer_engine",)
"""Routes whose objects are replaced and not changed, for the same reason."""
_ANYTHING: list[Any] = [
    None, True, False, 0, -1, 3, 1.5, -0.0, 1e308, 2**63, 10**30, "", "x", "3", "\x00é\U0001f600", "a" * 5000,
    [], {}, [[]], [None], [1, "x"], {"a": {"b": []}}, [1] * 300, [[[[[[1]]]]]], [{}], {"": 0}, [-1], [1e9],
]  # fmt: skip
_BROKEN: list[bytes] = [
    b"", b" ", b"{", b"}", b"[]", b"null", b"3", b'"x"', b"{]", b'{"prompt": }', b'{"a": 1} x', b'{"a": NaN}',
    b'{"prompt": "\xff\xfe"}', b'{"\xc3\x28": 1}', b"\x00", b'{"prompt": "\\ud800"}', b'{"seed": 1e999}',
    b'{"seed": ' + b"9" * 5000 + b"}", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}", b"\xef\xbb\xbf{}",
]  # fmt: skip
_ODD_HEADERS: list[bytes] = [
    b"x-request-id: \xff\xfe", b"x-request-id: " + b"i" * 300, b"expect: 100-continue", b"content-encoding: gzip",
    b"upgrade: websocket\r\nconnection: upgrade", b"connection: close", b"origin: https://elsewhere.example",
    b"x-session-id: \x80", b"x-data-parallel-rank: x", b"traceparent: 00-zz", b"accept: " + b"a/b," * 2000,
    b"content-type: application/xml", b"authorization: Basic \xe9", b"host: localhost\r\nhost: elsewhere.example",
    b"content-encoding: identity", b"cookie: " + b"c" * 8000,
]  # fmt: skip
_NO_HTTP: list[bytes] = [
    b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"\r\n" * 50, b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"\x00" * 1000,
    b"GET /health HTTP/1.1\r\nhost localhost\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"GET http://localhost/health HTTP/1.1\r\n\r\n",
]  # fmt: skip


class Sent(NamedTuple):
    """What one connection sends."""

    kind: str
    parts: list[bytes]
    """Written one after the other."""
    rows: list[Route | None] | None
    """The row of each request that must be answered, None for no row; None: who knows what comes back, if anything."""
    allowed: list[set[int]] | None = None
    """Statuses of each, where it is known."""
    then: Literal["read", "half-close", "leave", "reset"] = "read"
    """What the client does once all is written: leaving ones read a little before."""


class Requests:
    """Draws requests. The same seed draws the same."""

    def __init__(self, seed: object) -> None:
        self._draw = random.Random(str(seed))

    def next(self) -> Sent:
        """One of every kind, the frequent ones more often."""
        kinds: list[tuple[Callable[[], Sent], int]] = [
            (self._right, 4), (self._keys, 4), (self._fields, 6), (self._broken_json, 3), (self._query, 2),
            (self._odd_route, 2), (self._too_long, 1), (self._wrong_length, 2), (self._slow, 1), (self._pipelined, 2),
            (self._left_stream, 3), (self._mutated, 4), (self._no_http, 1),
        ]  # fmt: skip
        [kind] = self._draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        return kind()

    def _right(self) -> Sent:
        row = self._row(lambda row: row.path in _BODIES)
        status = {200, 409, 503} | ({400} if row.access is Access.ADMIN else set())
        return self._whole("right", row, _BODIES[row.path], allowed=status)

    def _keys(self) -> Sent:
        row = self._draw.choice(ROUTES)
        key = self._draw.choice([None, "wrong", "", "é", API_KEY if row.access is Access.ADMIN else "x" * 3000])
        allowed = {200, 503} if row.access is Access.ANYONE else {401}
        return self._whole("keys", row, self._changed(row), key=key, allowed=allowed)

    def _fields(self) -> Sent:
        row = self._row(lambda row: row.body is not None)
        return self._whole("fields", row, self._changed(row))

    def _broken_json(self) -> Sent:
        row = self._row(lambda row: row.body is not None)
        whole = json.dumps(self._changed(row)).encode()
        cut = whole[: self._draw.randrange(len(whole) + 1)]
        return self._whole("broken JSON", row, self._draw.choice([*_BROKEN, cut, _shuffled(self._draw, whole)]))

    def _query(self) -> Sent:
        row = self._row()
        names = [*(row.body.__struct_fields__ if row.body else ()), "no_such", "a[]", "%", ""]
        values = ["", "1", "true", "x", "%ff", "%00", "a" * 2000, "-1", "NaN", "[1]", "abort", "keep"]
        query = "&".join(
            f"{quote(self._draw.choice(names))}={self._draw.choice(values)}" for _ in range(self._draw.randint(1, 4))
        )
        if row.path in (*_PINNED, *_WHOLE_ONLY):
            query = "no_such=1"
        return self._whole("query", row, None, query=query)

    def _odd_route(self) -> Sent:
        method = self._draw.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
        path = self._draw.choice(["/", "/nothing", "//health", "/health/", "/v1", "/%2e%2e/x", "/a" * 500, "/%ff%00"])
        return Sent("odd route", [_request(method, path, b"", [_key(ADMIN_KEY)])], [None])

    def _too_long(self) -> Sent:
        row = self._row(lambda row: row.body is not None and not row.is_large and "POST" in row.methods)
        if self._draw.random() < 0.5:
            head = _request("POST", row.path, None, [b"content-length: %d" % (MAX_BODY_BYTES + 1), _key(ADMIN_KEY)])
            return Sent("too long", [head, b"x"], [row], [{413}])
        chunks = [b"%x\r\n%b\r\n" % (65536, b"x" * 65536)] * 5
        head = _request("POST", row.path, None, [b"transfer-encoding: chunked", _key(ADMIN_KEY)])
        return Sent("too long", [head, *chunks, b"0\r\n\r\n"], None, then="half-close")

    def _wrong_length(self) -> Sent:
        row = self._row(lambda row: row.body is not None)
        body = json.dumps(self._changed(row)).encode()
        said = max(0, len(body) + self._draw.choice([-5, -1, 1, 5, 100]))
        head = _request(row.methods[-1], row.path, None, [b"content-length: %d" % said, _key(ADMIN_KEY)])
        return Sent("wrong length", [head + body], None, then=self._draw.choice(["half-close", "leave", "reset"]))

    def _slow(self) -> Sent:
        whole = self._right()
        [data] = whole.parts
        cuts = sorted(self._draw.sample(range(1, len(data)), k=3))
        parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        if self._draw.random() < 0.5:
            return whole._replace(kind="slow", parts=parts)
        head, _, body = data.partition(b"\r\n\r\n")
        return Sent("never whole", [head + b"\r\n\r\n", body[:-1]], whole.rows, [{408}])

    def _pipelined(self) -> Sent:
        drawn = [self._draw.choice([self._right, self._keys, self._fields, self._query])() for _ in range(4)]
        rows = [row for each in drawn for row in each.rows or ()]
        allowed = [found for each in drawn for found in each.allowed or [set()]]
        data = b"".join(part for each in drawn for part in each.parts)
        if self._draw.random() < 0.3:
            return Sent("pipelined and left", [data], None, then=self._draw.choice(["leave", "reset"]))
        return Sent("pipelined", [data], rows, allowed)

    def _left_stream(self) -> Sent:
        row = self._row(lambda row: row.path in STREAMED)
        body = copy.deepcopy(_BODIES[row.path]) | {"stream": True}
        settings = body.get("sampling_params", body)
        settings |= {name: 50 for name in ("max_tokens", "max_new_tokens") if name in settings}
        settings |= {"n": 3, "ignore_eos": True}
        sent = self._whole("left stream", row, body)
        return sent._replace(rows=None, then=self._draw.choice(["half-close", "leave", "reset"]))

    def _mutated(self) -> Sent:
        [data] = self._draw.choice([self._right, self._fields, self._keys])().parts
        return Sent("mutated", [_shuffled(self._draw, data)], None, then="half-close")

    def _no_http(self) -> Sent:
        return Sent("no HTTP", [self._draw.choice(_NO_HTTP)], None, then="half-close")

    def _row(self, fits: Callable[[Route], bool] = lambda row: True) -> Route:
        return self._draw.choice([row for row in ROUTES if fits(row) and row.path not in _LEFT_ALONE])

    def _whole(
        self,
        kind: str,
        row: Route,
        body: Any,
        *,
        key: str | None = ADMIN_KEY,
        query: str = "",
        allowed: set[int] = frozenset(),  # type: ignore[assignment]
    ) -> Sent:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [] if key is None else [_key(key)]
        if kind == "fields" and self._draw.random() < 0.2:
            headers.append(self._draw.choice(_ODD_HEADERS))
        method = self._draw.choice(row.methods)
        target = f"{row.path}?{query}" if query else row.path
        if b"gzip" in b"".join(headers) or method == "GET":
            allowed = set()
        return Sent(kind, [_request(method, target, data, headers)], [row], [set(allowed)])

    def _changed(self, row: Route) -> dict[str, Any]:
        """A body of a route with some fields that are not as they should be."""
        names = list(row.body.__struct_fields__ if row.body else ())
        body = json.loads(json.dumps(_BODIES.get(row.path, {})))
        for _ in range(self._draw.randint(1, 3)):
            at = body
            nested = [value for value in body.values() if isinstance(value, dict) and value]
            if nested and row.path not in _WHOLE_ONLY and self._draw.random() < 0.5:
                at = self._draw.choice(nested)
            name = self._draw.choice([*names, *at, "no_such_field", "model"])
            if self._draw.random() < 0.15:
                at.pop(name, None)
            else:
                at[name] = copy.deepcopy(self._draw.choice(_ANYTHING))
        return body | _PINNED.get(row.path, {})


def _key(key: str) -> bytes:
    return b"authorization: Bearer " + key.encode()


def _request(method: str, target: str, body: bytes | None, headers: list[bytes]) -> bytes:
    """`body` None: the head alone, with the length among `headers`."""
    length = [] if body is None else [b"content-length: %d" % len(body)]
    lines = [f"{method} {target} HTTP/1.1".encode(), b"host: localhost", *length, *headers, b"", body or b""]
    return b"\r\n".join(lines)


def _shuffled(draw: random.Random, data: bytes) -> bytes:
    """The data with some of its bytes changed, lost, or come again."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not found:
            break
        at, size = draw.randrange(len(found)), draw.randint(1, 8)
        match draw.randrange(4):
            case 0:
                found[at] = draw.randrange(256)
            case 1:
                del found[at : at + size]
            case 2:
                found[at:at] = found[at : at + size]
            case _:
                found[at:at] = draw.randbytes(size)
    return bytes(found)
