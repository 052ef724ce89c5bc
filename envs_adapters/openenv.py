"""Environments of OpenEnv: those of a server, or a class in this process.

    make_env("openenv:ws://localhost:8000")        one WebSocket for each episode; needs the package `websockets` alone
    make_env("openenv:my_envs:EchoEnvironment")    an `Environment`, made here; needs the package `openenv`

Actions are JSON objects: an answer is the action's only text field, unless there is an `action_from_text`.
`done` is `terminated`: OpenEnv does not separate a limit of steps from an end. The time limit of a call, connecting
included, is the `step_timeout` of `make_env`.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

from envs_adapters.base import Action, Messages, Observation
from envs_adapters.openenv_data import Convert, action_data, converter, observation_of, observation_text, text_field
from envs_adapters.openenv_local import LocalEnv, check_local
from envs_adapters.rows import check_function
from rollout_engine.base.errors import ConfigError, refused

TRAITS: dict[str, Any] = {}

_MAX_MESSAGE_BYTES = 1 << 24
_SCHEMA_SECONDS = 10.0
_FULL_WAIT_SECONDS = (0.05, 1.0)
"""First and longest pause before a server that has no room for a session is asked again."""


class OpenEnvError(RuntimeError):
    """A server refused a reset or a step, or its environment raised there."""


def make(
    name: str,
    *,
    action_from_text: Convert | None = None,
    observation_to_text: Convert | None = None,
    reset_options: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    action_class: type | str | None = None,
) -> "RemoteEnv | LocalEnv":
    """One environment.

    Args:
        name: ws:// or wss:// and the server's address; or "module:Class" of an `Environment`.
        action_from_text: function from an answer's text to the action, a dict; "module:attribute" of one, such as
            "json:loads"; or {"field": NAME}, the field that takes the text. None: the only text field there is.
        observation_to_text: function from the observation, a dict, to a text or messages; "module:attribute" of one; or
            {"field": NAME}. None: the text of an observation that is one text field, and JSON of any other.
        reset_options: arguments of `reset` besides the seed, such as {"split": "train"}.
        arguments: of the class, in process.
        action_class: the environment's `Action`, or "module:attribute" of it, in process; None: as its class declares.
    """
    to_text = observation_text if observation_to_text is None else converter(observation_to_text, is_action=False)
    to_action = None if action_from_text is None else converter(action_from_text, is_action=True)
    options = dict(reset_options or {})
    if _is_address(name):
        return RemoteEnv(name, to_action, to_text, options)
    return LocalEnv(name, to_action, to_text, options, dict(arguments or {}), action_class)


def check(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Raise `ConfigError` unless the class or the server's schema is there and fits the options. Returns its traits."""
    for option in ("action_from_text", "observation_to_text"):
        value = options.get(option)
        if isinstance(value, Mapping):
            if list(value) != ["field"] or not isinstance(value["field"], str):
                raise ConfigError(refused(option, value, 'a function, "module:attribute" of one, or {"field": NAME}'))
        elif value is not None:
            check_function(option, value)
    if _is_address(name):
        local = [option for option in ("arguments", "action_class") if options.get(option) is not None]
        if local:
            raise ConfigError(f"openenv:{name}: {local[0]} is for environments in process; this one is a server's.")
        if options.get("action_from_text") is None:
            _text_field_of_server(name)
        return {}
    if find_spec("openenv") is None:
        advice = "pip install 'rollout-engine[openenv-server]' installs it. A server needs ws:// before its address"
        raise ConfigError(f"openenv:{name}: the package 'openenv' is not installed. {advice}.")
    check_function("the environment", name)
    try:
        made = make(name, **options)
        assert isinstance(made, LocalEnv)
        made.close()
        return check_local(name, made.env)
    except ConfigError:
        raise
    except Exception as problem:
        raise ConfigError(f"openenv:{name} cannot be made: {type(problem).__name__}: {problem}") from problem


class RemoteEnv:
    """An episode at a server, by a WebSocket of its own. Failures there raise `OpenEnvError`."""

    def __init__(
        self, address: str, to_action: Any, to_text: Callable[[Any], Messages], reset_options: dict[str, Any]
    ) -> None:
        self._address, self._to_action, self._to_text = address, to_action, to_text
        self._reset_options = reset_options
        self._socket: Any = None

    async def reset(self, seed: int) -> Observation:
        """Connect and start the episode; while the server has no room, ask again."""
        if self._to_action is None:
            field = await asyncio.to_thread(_text_field_of_server, self._address)
            self._to_action = converter({"field": field}, is_action=True)
        pause, longest = _FULL_WAIT_SECONDS
        while True:
            await self._connect()
            answer = await self._ask("reset", {**self._reset_options, "seed": seed})
            if answer.get("type") != "error" or answer.get("data", {}).get("code") != "CAPACITY_REACHED":
                return self._read(answer)
            await self.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def step(self, action: Action) -> Observation:
        """Send the action and wait for its observation."""
        return self._read(await self._ask("step", action_data(self._to_action, action.text)))

    async def close(self) -> None:
        """End the session and the connection, both once."""
        from websockets.exceptions import ConnectionClosed

        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(ConnectionClosed):
                await socket.send('{"type": "close"}')
            await socket.close()

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = _socket_url(self._address)
        try:
            self._socket = await connect(url, max_size=_MAX_MESSAGE_BYTES, ping_interval=None, close_timeout=1)
        except (OSError, WebSocketException) as problem:
            raise OpenEnvError(f"{url} cannot be reached: {type(problem).__name__}: {problem}") from problem

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # it may have said why before it closed
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as problem:
            raise OpenEnvError(f"{self._address} closed the connection at the {kind}: {problem}") from problem
        except ValueError as problem:
            raise OpenEnvError(f"{self._address} answered the {kind} by what is no JSON: {problem}") from problem
        return answer if isinstance(answer, dict) else {"type": type(answer).__name__}

    def _read(self, answer: Mapping[str, Any]) -> Observation:
        data = answer.get("data")
        if answer.get("type") == "observation" and isinstance(data, Mapping):
            return observation_of(data, self._to_text)
        if answer.get("type") != "error" or not isinstance(data, Mapping):
            raise OpenEnvError(f"{self._address} answered by a message of the type {answer.get('type')!r}")
        details = "".join(f"; {each}" for each in data.get("errors", ()))
        raise OpenEnvError(f"{self._address} says {data.get('code')}: {data.get('message')}{details}")


@lru_cache(maxsize=64)
def _text_field_of_server(address: str) -> str:
    parts = urlsplit(_socket_url(address))
    url = urlunsplit((parts.scheme.replace("ws", "http"), parts.netloc, parts.path[: -len("/ws")] + "/schema", "", ""))
    try:
        with urlopen(url, timeout=_SCHEMA_SECONDS) as answer:
            schema = json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        hint = "Start the server first, or give action_from_text"
        raise ConfigError(f"openenv:{address}: no schema of actions at {url}: {problem}. {hint}.") from problem
    return text_field(address, schema)


def _is_address(name: str) -> bool:
    return name.startswith(("ws://", "wss://"))


def _socket_url(address: str) -> str:
    address = address.rstrip("/")
    return address if address.endswith("/ws") else f"{address}/ws"
