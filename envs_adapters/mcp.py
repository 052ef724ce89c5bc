"""Tools of an MCP server, over stdio: "mcp:COMMAND ARGUMENT ...", for example "mcp:python my_tools.py".

    make_env("mcp:python my_tools.py", rows=[{"prompt": "What is 12 * 34?", "answer": "408"}], reward=score)

    def score(text, row):               # the answer that calls no tool, and its row; may be async
        return float(row["answer"] in text)

An episode has the row `rows[seed % len(rows)]`. Its calls are made by the server, one after the other, and the
failure of a call is a text that the policy reads, "Error: ..."; the first answer without a call ends it.
"""

import asyncio
import inspect
import json
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from envs_adapters.base import Action, Message, Messages, Observation, load
from envs_adapters.mcp_server import ServerCommand, ServerGone, ToolServer
from envs_adapters.rows import Rows, check_function, read_rows, row_of
from rollout_engine.base.errors import ConfigError, refused, unknown_name
from rollout_engine.base.tool_call import ToolCall

TRAITS: dict[str, Any] = {}

Reward: TypeAlias = Callable[[str, Mapping[str, Any]], float | Awaitable[float]]

_MAX_CHARACTERS = 1 << 18
"""Most characters of the text that one call returns."""


def make(
    name: str,
    *,
    rows: Rows,
    reward: Reward | str,
    tools: Sequence[str] | None = None,
    shared: bool = False,
    call_timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> "ToolEnv":
    """One environment.

    Args:
        name: the command that starts the server, quoted as a shell would.
        rows: dicts with "prompt", messages or a text, and the fields that the reward needs; or a JSONL file of them.
        reward: function of the last answer's text and its row; or "module:attribute" of one.
        tools: names of those that the policy may call; None: all of the server's.
        shared: whether all episodes of a rollout have one server, for tools that keep nothing between calls; else each
            has its own.
        call_timeout: seconds for each call; then the policy reads that it took too long.
        env: environment variables of the server besides the few that the package passes on.
        cwd: directory that it runs in.
    """
    command = ServerCommand(tuple(shlex.split(name)), tuple(sorted((env or {}).items())), cwd)
    return ToolEnv(command, rows, load(reward), tools, shared, call_timeout)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the command exists and the options fit."""
    for needed in ("rows", "reward"):
        if needed not in options:
            raise ConfigError(f"mcp:{name} needs the option {needed}.")
    try:
        command = shlex.split(name)
    except ValueError as problem:
        raise ConfigError(refused("the command", name, "quoted as for a shell", f"{problem}.")) from problem
    if not command or shutil.which(command[0], path=options.get("env", {}).get("PATH")) is None:
        raise ConfigError(refused("the command", name, "a program that exists, and its arguments"))
    read_rows(options["rows"], ["prompt"])
    check_function("reward", options["reward"])
    seconds = options.get("call_timeout", 1.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ConfigError(refused("call_timeout", seconds, "a positive number of seconds"))
    chosen = options.get("tools")
    if isinstance(chosen, str) or (chosen is not None and not all(isinstance(each, str) for each in chosen)):
        raise ConfigError(refused("tools", chosen, "a list of names"))


class ToolEnv:
    """An episode whose tools are a server's. A server that ends unasked raises `ServerGone`."""

    def __init__(
        self,
        command: ServerCommand,
        rows: Rows,
        reward: Reward,
        tools: Sequence[str] | None,
        shared: bool,
        call_timeout: float,
    ) -> None:
        self._command, self._rows, self._reward = command, rows, reward
        self._chosen, self._shared, self._call_timeout = tools, shared, call_timeout
        self._server: ToolServer | None = None
        self._row: Mapping[str, Any] = {}
        self._num_calls = 0
        self.tools: list[dict[str, Any]] = []
        """JSON schemas, once the episode has begun."""

    async def reset(self, seed: int) -> Messages:
        """Start the server, or use the shared one, and return the row's prompt."""
        self._row = row_of(self._rows, seed)
        self._server = ToolServer.of(self._command, shared=self._shared)
        known = {tool["name"]: tool for tool in await self._server.tools()}
        for name in self._chosen or ():
            if name not in known:
                raise ConfigError(unknown_name("tool of the server", name, known))
        chosen = known if self._chosen is None else self._chosen
        self.tools = [{"type": "function", "function": known[name]} for name in chosen]
        prompt: Messages = self._row["prompt"]
        return prompt

    async def step(self, action: Action) -> Observation:
        """Make the calls of the answer; one without any is the last, and has the reward."""
        if not action.tool_calls and not action.broken_calls:
            reward = self._reward(action.text, self._row)
            value = await reward if inspect.isawaitable(reward) else reward
            return Observation(reward=value, terminated=True, info={"num_tool_calls": self._num_calls})
        messages: list[Message] = []
        for call in action.tool_calls:
            messages.append({"role": "tool", "name": call.name, "content": await self._call(call)})
        messages += [{"role": "tool", "content": f"Error: {each.problem}"} for each in action.broken_calls]
        return Observation(messages, info={"num_tool_calls": self._num_calls})

    async def close(self) -> None:
        """Leave the server; one of the episode's own is ended."""
        server, self._server = self._server, None
        if server is not None:
            await server.leave()

    async def _call(self, call: ToolCall) -> str:
        names = [tool["function"]["name"] for tool in self.tools]
        if call.name not in names:
            return f"Error: {unknown_name('tool', call.name, names)}"
        assert self._server is not None
        self._num_calls += 1
        try:
            async with asyncio.timeout(self._call_timeout):
                result = await self._server.call(call.name, call.arguments)
        except TimeoutError:
            return f"Error: {call.name} did not return within {self._call_timeout:g} s."
        except ServerGone:
            raise
        except Exception as problem:
            return f"Error: {type(problem).__name__}: {problem}"[:_MAX_CHARACTERS]
        text = _text(result)
        if len(text) > _MAX_CHARACTERS:
            return f"Error: {call.name} returned {len(text)} characters, more than {_MAX_CHARACTERS}."
        return text


def _text(result: Mapping[str, Any]) -> str:
    """A call's result as text: parts that are no text are named."""
    parts = [part["text"] if part.get("type") == "text" else _name_part(part) for part in result.get("content", ())]
    if not parts and result.get("structuredContent") is not None:
        parts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    text = "\n".join(parts)
    return f"Error: {text}" if result.get("isError") and not text.startswith("Error") else text


def _name_part(part: Mapping[str, Any]) -> str:
    resource = part.get("resource") or {}
    if isinstance(resource.get("text"), str):
        return str(resource["text"])
    kind = part.get("mimeType") or resource.get("mimeType") or "no type"
    return f"[{part.get('type')} ({kind}), not shown]"
