"""The server as an ASGI application, for uvicorn, or for a client in the same process."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import msgspec

from rollout_engine.base.errors import RolloutEngineError, did_you_mean
from rollout_engine.base.lora_training import LoraTrainer
from rollout_engine.base.threads import run_in_thread
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.faces.verb_methods import Face
from rollout_engine.serve.access import Guard
from rollout_engine.serve.bodies import OpenBytes, read_body
from rollout_engine.serve.http_exchange import EXCHANGE, HttpExchange
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.problems import HttpProblem, problem_body, problem_reply
from rollout_engine.serve.request_log import REQUEST_ID, logger
from rollout_engine.serve.route import MANY_BYTES, Access, Asked, Dialect, Events, Reply, Route
from rollout_engine.serve.routes import ROUTES
from rollout_engine.serve.served import Served
from rollout_engine.serve.sessions.paths import read_path

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_EVENTS_TYPE = "text/event-stream; charset=utf-8"
_MAX_ID_CHARS = 200
"""Length limit of a request's id, and of a path that is reported."""
_FULL = "The server has max_connections=%d open: send the request again later, or elsewhere."
_DEEP = "The body is nested too deeply: send it with fewer lists and objects within each other."
_STOPPED = "The server has stopped before this request had ended: send it elsewhere."
_ID_ROOT, _IDS = uuid.uuid4().hex[:16], itertools.count(1)
_encode = msgspec.json.Encoder().encode


class App:
    """An ASGI 3 application over one engine. The engine is its owner's to shut down.

    >>> client = openai.AsyncOpenAI(
    ...     base_url="http://localhost/v1", api_key="-",
    ...     http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(App(policy))),
    ... )

    Args:
        engine: any face. One whose steps its own callers compute gets a thread that computes them.
        trainer: of adapters, for clients of Tinker's protocol (`rollouts.tinker.lora_trainer`).
    """

    def __init__(self, engine: Face, options: ServeOptions | None = None, trainer: LoraTrainer | None = None) -> None:
        self.served = Served(AsyncLLM.from_engine(engine), options or ServeOptions(), ROUTES, trainer)
        self.guard = Guard(self.served.options)
        self.open_bytes = OpenBytes(self.served.options.max_open_body_bytes)
        self._routes: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._routes.setdefault(route.path, {}).update(dict.fromkeys(route.methods, route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or follow the server's start and end."""
        if scope["type"] == "lifespan":
            await _follow_lifespan(receive, send)
        elif scope["type"] == "http":
            await _Answer(self, scope, receive, send).answer()
        else:  # a WebSocket
            await send({"type": "websocket.close", "code": 1003})

    def route(self, path: str, method: str) -> Route:
        """The row for a request. Raises `HttpProblem` 404 and 405."""
        rows = self._routes.get(path) or self._routes.get(path.rstrip("/"))
        if rows is None:
            meant = did_you_mean(path[:_MAX_ID_CHARS], self._routes) or "GET /v1/models says what is served."
            raise HttpProblem(404, f"There is no route {path:.200}. {meant} (docs/server.md lists all.)")
        route = rows.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(rows))
            hint = " A GET changes nothing here: send a POST." if method in ("GET", "HEAD") else ""
            raise HttpProblem(405, f"{path} takes {allowed}, not {method:.20}.{hint}", headers={"allow": allowed})
        return route


class _Answer:
    """One request and its response."""

    __slots__ = (
        *("_app", "_dialect", "_exchange", "_headers", "_is_gone", "_receive", "_request_id", "_scope", "_send"),
        *("_served", "_status"),
    )

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._served = app.served
        self._exchange: HttpExchange | None = scope.get("extensions", {}).get(EXCHANGE)
        """The request on its connection, if our own server runs the application; None under another server."""
        self._dialect: Dialect = "openai"
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = self._headers.get("x-request-id", "")
        is_usable = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_ID_CHARS
        self._request_id = given if is_usable else f"{_ID_ROOT}{next(_IDS):x}"
        self._status: int | None = None
        """The response's status; None before it has begun."""
        self._is_gone = False
        """Whether the client has left."""

    async def answer(self) -> None:
        token, start = REQUEST_ID.set(self._request_id), time.perf_counter()
        try:
            await self._answer()
        finally:
            end = "the client left" if self._is_gone else self._status
            seconds, path = time.perf_counter() - start, self._scope["path"][:_MAX_ID_CHARS]
            shown = path if path.isprintable() else ascii(path)  # a line of the log stays one line
            logger.info("%s %s: %s, %.3f s", self._scope["method"], shown, end, seconds)
            REQUEST_ID.reset(token)

    async def _answer(self) -> None:
        try:
            reply = await self._reply()
        except asyncio.CancelledError:
            if not self._is_gone and not self._served.is_ending:
                raise
            reply = None if self._is_gone or self._status else self._problem(HttpProblem(503, _STOPPED))
        except RecursionError:  # a body may be decoded, and yet be too deep for the code that handles it
            reply = self._problem(HttpProblem(400, _DEEP))
        except Exception as problem:
            reply = self._problem(problem)
        if isinstance(reply, Reply):
            await self._write(reply)

    async def _reply(self) -> Reply | None:
        """Have the handler answer; events are written here. None: the response is sent, or has no reader."""
        if self._scope["method"] == "OPTIONS" and "access-control-request-method" in self._headers:
            return self._app.guard.answer_preflight(self._headers)
        reached = read_path(self._scope["path"])
        route = self._app.route(reached.path, self._scope["method"])
        self._dialect = route.dialect
        if self._exchange is not None and self._exchange.is_surplus:
            raise HttpProblem(503, _FULL % self._served.options.max_connections)
        self._app.guard.check(Access.ANYONE if reached.by_agent else route.access, self._headers)
        session = self._served.sessions.open(reached.session_id, self._headers) if reached.by_agent else None
        data = await self._read(route)
        if data is None:
            return None
        query = self._scope["query_string"].decode("latin-1")
        is_slow = len(data) > MANY_BYTES
        body = await run_in_thread(read_body, route, data, query) if is_slow else read_body(route, data, query)
        named = self._served.versions.read(body)
        asked = Asked(body, self._headers, self._request_id, len(data), path_id=reached.session_id)
        stop_watching = self._watch_client()
        try:
            await self._served.media.read(asked)
            answer = (
                route.answer(self._served, asked)
                if session is None
                else session.answer(route, asked, self._served, data)
            )
            del data  # a stream may be open for long
            reply = await answer
            self._served.versions.confirm(named)
            if isinstance(reply, Events):
                await self._write_events(reply)
                return None
        finally:
            stop_watching()
            if session is not None:
                session.leave()
            self._served.media.release(asked)
        return reply

    def _watch_client(self) -> Callable[[], object]:
        """Have this task cancelled once the client has left, as our own server reports it, or another one when asked.

        Returns a function that ends the watch.
        """
        task = asyncio.current_task()
        assert task is not None, "a request is answered by a task"

        def leave() -> None:
            self._is_gone = True
            task.cancel()

        if self._exchange is not None:
            return self._exchange.call_on_leave(leave)
        return asyncio.ensure_future(self._follow(leave)).cancel

    async def _follow(self, leave: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        leave()

    async def _read(self, route: Route) -> bytes | None:
        """The body; None if the client has left. Raises `HttpProblem`: 413 for one too long, 408 for a slow one."""
        options = self._served.options
        limit = options.max_weight_bytes if route.is_large else options.max_body_bytes
        said = self._headers.get("content-length", "")
        if said.isdigit() and int(said) > limit:
            raise self._too_long(limit)
        if said == "0" or (not said and "transfer-encoding" not in self._headers and self._scope["method"] == "GET"):
            return b""
        if self._headers.get("content-encoding", "identity") != "identity":
            raise HttpProblem(415, "Send the body without a content encoding.")
        if self._exchange is not None and self._exchange.has_body:
            if self._exchange.is_gone:
                return None
            data = self._exchange.take_body()
            if len(data) > limit:
                raise self._too_long(limit)
            return data
        try:
            async with asyncio.timeout(None if route.is_large else options.body_seconds):
                return await self._read_parts(limit, OpenBytes(limit) if route.is_large else self._app.open_bytes)
        except TimeoutError:
            message = f"The body did not come within {options.body_seconds:g} seconds."
            raise HttpProblem(408, message, headers={"connection": "close"}) from None

    async def _read_parts(self, limit: int, open_bytes: OpenBytes) -> bytes | None:
        parts, size, more = [], 0, True
        try:
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return None
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limit:
                    raise self._too_long(limit)
                open_bytes.add(len(part))
                parts.append(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            open_bytes.count -= size

    def _too_long(self, limit: int) -> HttpProblem:
        return HttpProblem(413, f"The body is longer than {limit} bytes.", headers={"connection": "close"})

    def _problem(self, problem: BaseException) -> Reply:
        if not isinstance(problem, RolloutEngineError | HttpProblem):
            logger.error("%s %s failed", self._scope["method"], self._scope["path"], exc_info=problem)
        return problem_reply(problem, self._dialect)

    async def _write(self, reply: Reply) -> None:
        try:
            data = _encode_body(reply.body)
        except (
            ValueError,
            TypeError,
            RecursionError,
        ) as problem:  # no client waits for an answer that cannot be written
            reply = self._problem(problem)
            data = _encode_body(reply.body)
        await self._begin(reply.status, reply.content_type, reply.headers, len(data))
        await self._send({"type": "http.response.body", "body": b"" if self._scope["method"] == "HEAD" else data})

    async def _write_events(self, reply: Events) -> None:
        """Write events as they arrive. The response begins with the first, so that a refusal has its own status."""
        try:
            async for event in reply.events:
                if self._status is None:
                    await self._begin(200, _EVENTS_TYPE, {**reply.headers, "cache-control": "no-cache"})
                await self._send_event(event, reply)
        except (Exception, asyncio.CancelledError) as caught:
            is_cancelled = isinstance(caught, asyncio.CancelledError)
            if self._status is None or (is_cancelled and (self._is_gone or not self._served.is_ending)):
                raise
            problem = HttpProblem(503, _STOPPED) if is_cancelled else caught
            self._problem(problem)
            write = reply.write_problem or partial(problem_body, dialect=self._dialect)
            await self._send_event(write(problem), reply)
        last = b"" if reply.are_named else b"data: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_event(self, event: Any, reply: Events) -> None:
        name = b"event: %b\n" % event["type"].encode() if reply.are_named else b""
        await self._send(
            {"type": "http.response.body", "body": b"%bdata: %b\n\n" % (name, _encode(event)), "more_body": True}
        )

    async def _begin(self, status: int, content_type: str, headers: dict[str, str], length: int | None = None) -> None:
        """Begin the response, whose body has `length` bytes; None: not known yet."""
        self._status = status
        raw = [
            (b"content-type", content_type.encode()),
            (b"x-request-id", self._request_id.encode()),
            (b"x-weight-version", b"%d" % self._served.weight_version),
        ]
        if length is not None:
            raw.append((b"content-length", b"%d" % length))
        headers = self._app.guard.headers_for_pages(self._headers) | headers
        raw += [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def _encode_body(body: Any) -> bytes:
    if body is None or isinstance(body, bytes):
        return body or b""
    return body.encode() if isinstance(body, str) else _encode(body)


async def _follow_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
