"""A server of MCP tools: a process that is spoken to over stdio by the package `mcp`, on the running event loop."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

_CLOSED_STREAMS = ("BrokenResourceError", "ClosedResourceError")
"""Errors of `anyio` if a message cannot be sent any more."""


class ServerCommand(NamedTuple):
    """How a server is started."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None


class ServerGone(RuntimeError):
    """A server of tools did not start, or has ended unasked."""


class ToolServer:
    """A server, for one user or several; the last one that leaves ends it.

    A task of its own holds the connection: the package wants it closed by the task that opened it.
    """

    _shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ServerCommand, ToolServer]]" = WeakKeyDictionary()

    def __init__(self, command: ServerCommand) -> None:
        self._command = command
        self._num_users = 0
        self._is_gone = False
        self._ended = asyncio.Event()
        self._tools: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._session: Any = None
        self._task = asyncio.create_task(self._run(), name=" ".join(command.command))

    @classmethod
    def of(cls, command: ServerCommand, *, shared: bool) -> "ToolServer":
        """A server of one's own, or the event loop's shared one; either is left by `leave`."""
        server = None
        if shared:
            servers = cls._shared.setdefault(asyncio.get_running_loop(), {})
            server = servers.get(command)
            if server is None or server._is_gone:
                server = servers[command] = cls(command)
        server = server or cls(command)
        server._num_users += 1
        return server

    async def tools(self) -> list[dict[str, Any]]:
        """Its tools, each {"name", "description", "parameters"}, once it has started. Raises `ServerGone`."""
        return await asyncio.shield(self._tools)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call, as the protocol has it. Raises `ServerGone`, and the server's own errors."""
        import mcp

        if self._is_gone:
            raise ServerGone(f"{self._task.get_name()} has ended")
        try:
            result = await self._session.call_tool(name, dict(arguments))
        except Exception as problem:
            error = getattr(problem, "error", None)
            is_closed = getattr(error, "code", None) == mcp.types.CONNECTION_CLOSED
            if not is_closed and type(problem).__name__ not in _CLOSED_STREAMS:
                raise
            self._is_gone = True
            raise ServerGone(f"{self._task.get_name()} has ended by itself during a call of {name}") from problem
        return dict(result.model_dump(by_alias=True, mode="json"))

    async def leave(self) -> None:
        """One user less; after the last one the process is ended."""
        self._num_users -= 1
        if self._num_users:
            return
        servers = self._shared.get(asyncio.get_running_loop(), {})
        if servers.get(self._command) is self:
            del servers[self._command]
        self._is_gone = True
        self._ended.set()
        if not self._tools.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        program, *arguments = self._command.command
        settings = StdioServerParameters(
            command=program, args=arguments, env=dict(self._command.env) or None, cwd=self._command.cwd
        )
        problem: BaseException | None = None
        try:
            async with stdio_client(settings) as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                self._session = session
                self._tools.set_result(await _all_tools(session))
                await self._ended.wait()
        except BaseException as raised:
            problem = raised
        self._is_gone = True
        if not self._tools.done():
            reason = _cause(problem)
            gone = ServerGone(f"{self._task.get_name()} did not start: {type(reason).__name__}: {reason}")
            gone.__cause__ = problem
            self._tools.set_exception(gone)
            self._tools.exception()  # whether or not anyone waits for it


async def _all_tools(session: Any) -> list[dict[str, Any]]:
    from mcp.types import PaginatedRequestParams

    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        data = page.model_dump(by_alias=True, mode="json")
        for tool in data["tools"]:
            described = {"name": tool["name"], "description": tool.get("description") or ""}
            tools.append(described | {"parameters": tool["inputSchema"]})
        cursor = data.get("nextCursor")
        if not cursor:
            return tools


def _cause(problem: BaseException | None) -> BaseException | None:
    """The exception inside groups of one."""
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1:
        problem = problem.exceptions[0]
    return problem
