"""The sessions of a server, and the requests of their agents."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from rollout_engine.serve.access import key_of
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Events, Reply, Route
from rollout_engine.serve.sessions.call import ForcedParams, SessionCall
from rollout_engine.serve.sessions.retries import Retries
from rollout_engine.sessions.errors import SessionNotFoundError
from rollout_engine.sessions.limits import SessionLimits
from rollout_engine.sessions.messages import digest
from rollout_engine.sessions.prompts import PromptCache
from rollout_engine.sessions.registry import Sessions
from rollout_engine.sessions.session import Session

_ATTEMPT = "x-stainless-retry-count"
"""Header in which OpenAI's and Anthropic's clients count the attempts of a request, from 0."""
_OFF = "This server keeps no sessions: start it with --sessions."


class ServedSessions:
    """All sessions of one server, on its event loop; any thread may use `registry`, `delete` and `end_late`."""

    def __init__(self, options: ServeOptions) -> None:
        limits = SessionLimits(
            options.session_seconds, options.session_tokens, options.session_bytes, options.session_turns
        )
        self.registry = Sessions(options.max_sessions, limits, options.all_sessions_bytes)
        self._is_on, self._retry_seconds = options.sessions, options.session_retry_seconds
        self._retries: dict[str, Retries] = {}
        self._sweep_at = 0.0
        """When answers that are kept for retries are looked through next."""
        self._prompts: PromptCache | None = None
        self._forced: ForcedParams = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def are_on(self) -> bool:
        """Whether the server keeps sessions."""
        return self._is_on

    def require_on(self) -> Sessions:
        """The registry, without sessions that ended long ago. Raises `HttpProblem` 404 without `--sessions`."""
        if not self._is_on:
            raise HttpProblem(404, _OFF)
        self.end_late()
        return self.registry

    def end_late(self) -> None:
        """Delete the sessions that ended long ago; their requests are cancelled. Any thread may call it."""
        for session_id in self.registry.end_late(time.monotonic()):
            self._forget_on_loop(session_id)

    def open(self, session_id: str, headers: Any) -> "SessionRequest":
        """A request of a session's agent. Raises `SessionNotFoundError` for an unknown id, and for another key."""
        self._loop = asyncio.get_running_loop()
        registry, keys = self.require_on(), [key_of(headers).decode("latin-1"), headers.get("x-api-key", "")]
        try:
            session = registry.open(session_id, keys[0])
        except SessionNotFoundError:  # some clients send both headers, and one of them is not the session's
            session = registry.open(session_id, keys[1])
        return SessionRequest(self, session)

    def delete(self, session_id: str) -> None:
        """Forget a session; its requests are cancelled. Raises `SessionNotFoundError`. Any thread may call it."""
        self.registry.delete(session_id)
        self._forget_on_loop(session_id)

    def _forget_on_loop(self, session_id: str) -> None:
        if self._loop is None or self._loop.is_closed():
            self._forget(session_id)  # nothing runs that it could disturb
        else:
            self._loop.call_soon_threadsafe(self._forget, session_id)

    def retries_of(self, session: Session) -> Retries:
        """The answers that are kept for a session."""
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + self._retry_seconds
            for kept in self._retries.values():
                kept.forget_late(now)
            self._retries = {each: kept for each, kept in self._retries.items() if len(kept)}
        return self._retries.setdefault(session.id, Retries(self._retry_seconds, session.memory))

    def call(self, session: Session, asked: Asked, served: Any) -> SessionCall:
        """The session's part of a request. Raises `HttpProblem` 400 without a tokenizer."""
        if self._prompts is None:
            pictures = served.engine.frontend.inputs.pictures
            self._prompts = PromptCache(served.codec, served.max_model_len, pictures)
        return SessionCall(session, asked, served.codec, self._prompts, self._forced, lambda: served.weight_version)

    def _forget(self, session_id: str) -> None:
        kept = self._retries.pop(session_id, None)
        if kept is not None:
            kept.close()


class SessionRequest:
    """One request of an agent, which may be a copy of an earlier one."""

    def __init__(self, owner: ServedSessions, session: Session) -> None:
        self._owner, self.session = owner, session
        self._leave: Callable[[], None] = lambda: None

    async def answer(self, route: Route, asked: Asked, served: Any, data: bytes) -> Reply | Events:
        """The response; a request that is sent again gets that of the first. `data`: of the body. `leave` it after."""
        if route.verb != "generate":
            await _accept_model(asked, served)
            return await route.answer(served, asked)
        asked.session_name = self.session.id
        key = await asked.read_fields(_digest_of, route.path, asked.headers.get("idempotency-key"), data)
        del data
        retries = self._owner.retries_of(self.session)
        is_new = asked.headers.get(_ATTEMPT) == "0"
        answer = retries.join(key, lambda: self._run(route, asked, served), time.monotonic(), is_new=is_new)
        self._leave = lambda: retries.leave(key, answer, time.monotonic())
        return await answer.read()

    def leave(self) -> None:
        """The response is sent, or has no reader any more."""
        self._leave()
        self._leave = lambda: None

    async def _run(self, route: Route, asked: Asked, served: Any) -> Reply | Events:
        await _accept_model(asked, served)
        call = asked.session = self._owner.call(self.session, asked, served)
        try:
            reply = await route.answer(served, asked)
        except BaseException:
            call.close()
            raise
        if isinstance(reply, Events):
            return msgspec.structs.replace(reply, events=_closing(reply.events, call))
        call.close()
        return reply


async def _accept_model(asked: Asked, served: Any) -> None:
    """Have a name that is no adapter's mean the model that is served: agents have names of their own."""
    if not hasattr(asked.body, "model"):  # a GET
        return
    try:
        await served.adapter_of(asked.body.model)
    except HttpProblem:
        asked.body.model = None


async def _closing(events: AsyncIterator[Any], call: SessionCall) -> AsyncIterator[Any]:
    try:
        async for event in events:
            yield event
    finally:
        call.close()


def _digest_of(path: str, idempotency_key: str | None, data: bytes) -> bytes:
    return digest([path, idempotency_key, msgspec.json.decode(data or b"{}")])
