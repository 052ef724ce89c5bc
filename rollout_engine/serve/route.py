"""A row of the route table, a handler's request, and its reply."""

import enum
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import msgspec
from msgspec import structs

from rollout_engine.base.threads import run_in_thread

P = ParamSpec("P")
R = TypeVar("R")

Dialect: TypeAlias = Literal["openai", "vllm", "sglang", "anthropic", "tinker"]


LONG_BYTES = 1 << 12
"""Bytes of a body, or characters of a text, from which on texts are encoded off the event loop."""
MANY_BYTES = 1 << 20
"""Bytes of a body from which on its fields and token ids are checked there too."""


class Access(enum.Enum):
    """Who may call a route."""

    ANYONE = "anyone"
    CLIENT = "clients"
    """Holders of the API key or the admin key."""
    ADMIN = "admins"
    """Holders of the admin key."""


class Asked(msgspec.Struct):
    """One request for a handler."""

    body: Any
    """Of the route's body type; None for a route without one."""
    headers: Mapping[str, str]
    """Names in lower case."""
    request_id: str
    """The client's X-Request-Id, or a new one."""
    num_bytes: int = 0
    """Of the request's body."""
    num_picture_bytes: int = 0
    """That its pictures take, as `MediaReader` counts them."""
    path_id: str = ""
    """The id in the path, for routes with {id}."""
    session: Any = None
    """`SessionCall` of a request that samples in a session; None outside of sessions."""
    session_name: str = ""
    """Id of the session that the request belongs to; "" for none."""

    @property
    def is_long(self) -> bool:
        """Whether reading the texts of the body takes so long that other requests should not wait for it."""
        return self.num_bytes > LONG_BYTES or self.has_pictures

    @property
    def has_pictures(self) -> bool:
        """Whether the body holds pictures, whose placeholders make a long text."""
        return self.num_picture_bytes > 0

    async def read_texts(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a function that encodes texts of the body; on a thread if they are long."""
        return await run_in_thread(function, *args, **kwargs) if self.is_long else function(*args, **kwargs)

    async def read_fields(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a function that reads the fields of the body; on a thread if it is very long."""
        is_slow = self.num_bytes > MANY_BYTES or self.has_pictures
        return await run_in_thread(function, *args, **kwargs) if is_slow else function(*args, **kwargs)

    @property
    def session_id(self) -> str | None:
        """Which session of the client this belongs to: a fleet keeps it on one replica, which has its KV."""
        if self.session_name:
            return self.session_name
        get = self.headers.get
        rank = get("x-data-parallel-rank")
        by_rank = f"data-parallel-rank-{rank}" if rank else None
        return get("x-session-id") or get("x-smg-routing-key") or by_rank

    @property
    def trace_headers(self) -> dict[str, str] | None:
        """W3C trace context of the client, so that the engine's spans join its trace."""
        return {name: self.headers[name] for name in ("traceparent", "tracestate") if name in self.headers} or None


class Reply(msgspec.Struct):
    """A whole response."""

    body: Any = None
    """The value that is written as JSON; bytes and str are sent as they are; None: an empty body."""
    status: int = 200
    headers: dict[str, str] = {}
    content_type: str = "application/json"


class Events(msgspec.Struct):
    """A response of server-sent events, closed by "[DONE]" unless they are named."""

    events: AsyncIterator[Any]
    """Each is written as JSON."""
    headers: dict[str, str] = {}
    are_named: bool = False
    """Whether each is sent under its "type" as the event's name."""
    write_problem: Callable[[BaseException], Any] | None = None
    """Makes the event of an error behind other events; None: the body of the error is the event."""


Handler: TypeAlias = Callable[..., Awaitable[Reply | Events]]
"""Takes the `Served` engine, the request, and, as its keyword parameters, the fields of the body."""


@cache
def body_of(handler: Handler) -> type[msgspec.Struct] | None:
    """A struct whose fields are the keyword parameters of a handler; None for a handler without any."""
    fields: list[Any] = [
        (each.name, each.annotation, *(() if each.default is each.empty else (each.default,)))
        for each in inspect.signature(handler).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    if not fields:
        return None
    name = handler.__name__.title().replace("_", "") + "Body"
    return msgspec.defstruct(name, fields, module=handler.__module__, kw_only=True, forbid_unknown_fields=True)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the route table."""

    path: str
    methods: tuple[str, ...]
    dialect: Dialect
    access: Access
    handler: Handler
    verb: str
    """The engine's verb that it calls; "" if the server answers without one."""
    body: type[msgspec.Struct] | None = None
    """Type of the JSON of its body, or of its query: `body_of` the handler, or a struct that it takes whole."""
    is_raw: bool = False
    """Whether the handler gets the bytes of its body, which need not be JSON."""
    is_large: bool = False
    """Whether its body may hold weights, and so exceed `ServeOptions.max_body_bytes`."""
    ignored: frozenset[str] = frozenset()
    """Fields of clients that change nothing here."""
    neutral: Mapping[str, tuple[Any, ...]] = {}
    """Fields that this server does not support -> their values that ask for nothing. Any other value is refused."""

    @property
    def help(self) -> str:
        """First line of the handler's docstring."""
        return (self.handler.__doc__ or "").partition("\n")[0]

    async def answer(self, served: Any, asked: Asked) -> Reply | Events:
        """Have the handler answer a request. `served`: the `Served` engine."""
        fields = {} if self.body is None or self.body is not body_of(self.handler) else structs.asdict(asked.body)
        return await self.handler(served, asked, **fields)


def route_rows(
    methods: str, paths: str, dialect: Dialect, who: str, handler: Handler, verb: str = "", **more: Any
) -> list[Route]:
    """The rows of a handler: one for each of its paths. `who`: "anyone", "client" or "admin"."""
    more.setdefault("body", body_of(handler))
    common: dict[str, Any] = {"methods": tuple(methods.split()), "dialect": dialect, "access": _WHO[who], "verb": verb}
    return [Route(path=path, handler=handler, **common, **more) for path in paths.split()]


_WHO = {"anyone": Access.ANYONE, "client": Access.CLIENT, "admin": Access.ADMIN}
