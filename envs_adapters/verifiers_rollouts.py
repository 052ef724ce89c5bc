"""Environments of verifiers 0.3, run whole: they ask a client in this process, which is the policy that plays."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from envs_adapters.base import Action, Message, Observation
from rollout_engine.base.errors import ConfigError

_CUT = frozenset({"max_turns_reached", "timeout_reached", "prompt_too_long", "max_total_completion_tokens_reached"})
"""Conditions of verifiers that cut a rollout off."""
_ASKS_TWICE = "the environment asks for two answers at once, but one policy plays"
_lock = threading.Lock()
"""Held while an environment is loaded, so that it is loaded once."""


def check(name: str, options: Mapping[str, Any], max_tasks: int | None) -> dict[str, Any]:
    """Raise `ConfigError` unless the environment exists, has rows, and rewards each rollout separately."""
    try:
        env, _ = load_environment(name, options, max_tasks)
    except Exception as problem:
        text = f"verifiers:{name} refuses {dict(options)}: {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem
    if env.rubric.has_group_rewards:
        raise ConfigError(f"verifiers:{name} rewards groups as a whole: only verifiers itself can score them.")
    return {"is_single_turn": _is_single_turn(env)}


class RolloutEnv:
    """An episode of one row: a rollout of verifiers, whose requests are the policy's turns.

    Its last `info` has "metrics", "stop_condition" and "row". The reward, at the end, is verifiers' own: a reward
    function that raises counts 0 there. A rollout that ends an episode by its own `max_turns` gets no reward, as
    verifiers then never scores: allow as many turns as the environment has. An answer is its whole text, thinking
    and written tool calls included; tokens of prompts count as 0. An environment that asks for two answers at once, or
    does not continue the conversation that it began, fails.
    """

    def __init__(self, name: str, options: Mapping[str, Any], max_tasks: int | None) -> None:
        self._env, self._rows = load_environment(name, options, max_tasks)
        self._name, self._index = name, 0
        self._rollout: asyncio.Task[Any] | None = None
        self._asked: asyncio.Queue[tuple[list[Message], list[Any]]] = asyncio.Queue()
        self._answer: asyncio.Future[Any] | None = None
        self._said: list[Message] = []
        """The conversation so far."""
        self._num_calls = 0
        self._asks_twice = False
        self.tools: list[dict[str, Any]] = []
        """JSON schemas, once the episode has begun."""

    async def reset(self, seed: int) -> Observation:
        """Start the rollout, and show its first request."""
        self._index = seed % len(self._rows)
        client = _client_type()(self._ask)
        row = dict(self._rows[self._index])
        self._rollout = asyncio.create_task(self._env.run_rollout(row, client, "policy", {}))
        request = await self._next_request()
        if request is None:
            raise ValueError(
                f"verifiers:{self._name} ended before its first request: {self._rollout.result()['error']}"
            )
        self._said, tools = request
        self.tools = [_schema(tool) for tool in tools]
        return Observation([_format_message(message) for message in self._said], info={"row": self._index})

    async def step(self, action: Action) -> Observation:
        """Answer the request; then show the next one, or the reward."""
        answer = self._response(action)
        assert self._answer is not None and self._rollout is not None
        self._answer.set_result(answer)
        self._said.append(_extract_compared(answer.message))
        request = await self._next_request()
        if request is None:
            return self._end(self._rollout.result())
        said, tools = request
        known = len(self._said)
        if said[:known] != self._said or [_schema(tool) for tool in tools] != self.tools:
            advice = "an environment must keep what was said, and its tools"
            raise ValueError(f"verifiers:{self._name} rewrote the conversation: {advice}.")
        self._said = said
        return Observation([_format_message(message) for message in said[known:]], info={"row": self._index})

    async def close(self) -> None:
        """Cancel a rollout that has not ended."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._rollout

    async def _ask(self, prompt: Any, tools: Any) -> Any:
        """Called by the rollout: the policy's answer to a prompt."""
        if self._answer is not None:
            self._asks_twice = True
            raise RuntimeError(_ASKS_TWICE)
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(([_extract_compared(message) for message in prompt], list(tools or ())))
        try:
            return await self._answer
        finally:
            self._answer = None

    async def _next_request(self) -> tuple[list[Message], list[Any]] | None:
        """The rollout's next request; None when it has ended."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if self._asks_twice:
                raise ValueError(f"verifiers:{self._name}: {_ASKS_TWICE}.")
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    def _end(self, output: Mapping[str, Any]) -> Observation:
        if output["error"] is not None:
            raise ValueError(f"verifiers:{self._name} failed: {output['error']}")
        reason = output["stop_condition"]
        is_cut = reason in _CUT and not _is_single_turn(self._env)
        info = {"metrics": output["metrics"], "stop_condition": reason, "row": self._index}
        return Observation(reward=float(output["reward"]), terminated=not is_cut, truncated=is_cut, info=info)

    def _response(self, action: Action) -> Any:
        from verifiers.types import Response, ResponseMessage, ToolCall, Usage

        calls = []
        for call in action.tool_calls:
            self._num_calls += 1
            arguments = json.dumps(call.arguments)
            calls.append(ToolCall(id=f"call_{self._num_calls}", name=call.name, arguments=arguments))
        reason = "length" if action.is_cut else "tool_calls" if calls else "stop"
        message = ResponseMessage(
            content=action.text, tool_calls=calls or None, finish_reason=reason, is_truncated=action.is_cut
        )
        num = len(action.token_ids)
        usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=num, total_tokens=num)
        return Response(id=f"answer_{len(self._said)}", created=0, model="policy", usage=usage, message=message)


def load_environment(name: str, options: Mapping[str, Any], max_tasks: int | None) -> tuple[Any, Any]:
    """(environment, rows), loaded once. Raises the errors of verifiers."""
    with _lock:
        return _load_environment(name, json.dumps(options, sort_keys=True), max_tasks)


@lru_cache(maxsize=8)
def _load_environment(name: str, options: str, max_tasks: int | None) -> tuple[Any, Any]:
    import verifiers

    with _same_signal_handlers():
        env = verifiers.load_environment(name, **json.loads(options))
    rows = (
        env.get_dataset(max_tasks or -1) if env.build_dataset() is not None else env.get_eval_dataset(max_tasks or -1)
    )
    return env, rows


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """A block that leaves the handlers of signals as they are: environments put their own in their place."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@lru_cache(maxsize=1)
def _client_type() -> type[Any]:
    from verifiers.clients import Client

    class PolicyClient(Client):  # type: ignore[misc]
        """Passes requests to a function (prompt, tools) and its answers back."""

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **options: Any
        ) -> Any:
            return await self.client(prompt, tools)

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return PolicyClient


def _is_single_turn(env: Any) -> bool:
    return getattr(env, "max_turns", 0) == 1


def _extract_compared(message: Any) -> Message:
    """The parts of a message that must stay the same."""
    data: Message = message.model_dump(exclude_none=True)
    return {name: data[name] for name in ("role", "content", "tool_calls", "tool_call_id") if name in data}


def _format_message(message: Message) -> Message:
    """The message as chat templates take it."""
    shown = dict(message)
    if shown["role"] == "text":
        shown["role"] = "user"
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    return shown


def _schema(tool: Any) -> dict[str, Any]:
    inner = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": inner}
