"""A worker process that plays environments.

    python -m rollout_engine.rollouts.episodes.env_worker DESCRIPTOR SECONDS

It carries out one order after the other; the event loop of async environments runs only while one of them is called.
It ends when its parent does, and after SECONDS without an order or an episode.
"""

import asyncio
import faulthandler
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from envs_adapters.base import EnvSpec
from envs_adapters.families import import_package
from rollout_engine.base.user_code import UserCode
from rollout_engine.children.channel import Channel
from rollout_engine.rollouts.episodes.env_host import EnvHost, failure_of, name_of_env, one_line
from rollout_engine.rollouts.episodes.env_wire import (
    Close,
    End,
    Load,
    NumberedOrder,
    Order,
    Reply,
    Reset,
    Reuse,
    Step,
    encode_reply,
)
from rollout_engine.rollouts.episodes.factory_reference import changed_source, find
from rollout_engine.rollouts.episodes.random_state import RandomState

_EXIT_SECONDS = 5.0


class Worker:
    """The environments of one worker process."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        """Awaits the results of async environments."""
        self._spec: EnvSpec | None = None
        self._load_time = 0.0
        """Time at which the factory was loaded, by the clock of the file system."""
        self._hosts: dict[int, tuple[EnvHost, RandomState]] = {}

    @property
    def has_episodes(self) -> bool:
        return bool(self._hosts)

    def answer(self, asked: NumberedOrder) -> bytes:
        """Carry out an order and encode the reply, which includes any exception that an environment raises."""
        order = asked.order
        what = "environment" if self._spec is None else name_of_env(self._spec)
        what = f"{order.reference.name or order.reference.factory}: import" if isinstance(order, Load) else what
        what += f": {type(order).__name__.lower()}" if isinstance(order, Reset | Step | Close) else ""
        try:
            with UserCode(lambda: what):
                reply = self._carry_out(order)
            return encode_reply(reply, asked.number)
        except BaseException as problem:  # also an exit: it ends an episode, not the other ones of this process
            return encode_reply(Reply(failure=_text(failure_of(what, problem).reason)), asked.number)

    def _carry_out(self, order: Order) -> Reply:
        match order:
            case Load():
                self._load_time = time.time()
                self._spec = find(order.reference)
                import_package(self._spec.factory)
                return Reply()
            case Reset():
                return Reply(began=self._reset(order))
            case Step():
                host, state = self._hosts[order.key]
                return Reply(observation=self._call(state, lambda: host.step(order.action)))
            case Reuse():
                return Reply(failure=self._unfit_reason())
            case _:
                return self._close(order)

    def _reset(self, order: Reset) -> Any:
        assert self._spec is not None
        while True:
            host, state = self._hosts[order.key] = EnvHost(self._spec), RandomState(order.seed)
            began = self._call(state, lambda host=host: host.reset(order.seed))  # type: ignore[misc]
            if not state.has_missed:
                return began
            with suppress(Exception):  # it drew from a generator without the seed: once more
                self._call(state, host.close)

    def _close(self, order: Order) -> Reply:
        host, state = self._hosts.pop(order.key, (None, None)) if isinstance(order, Close) else (None, None)
        if host is not None and state is not None:
            self._call(state, host.close)
        return Reply()

    def _unfit_reason(self) -> str:
        """Why another rollout cannot run here; "" if it can."""
        if self._hosts:
            return f"{len(self._hosts)} of its episodes are not closed"
        changed = changed_source(self._load_time)
        return changed and f"{changed} has changed since it was loaded"

    def _call(self, state: RandomState, function: Callable[[], Any]) -> Any:
        with state:
            value = function()
            return self._runner.run(_wait(value)) if inspect.isawaitable(value) else value


def main() -> None:
    """Carry out orders until the last one, or until none has arrived for long."""
    channel, idle_seconds = Channel(socket.socket(fileno=int(sys.argv[1]))), float(sys.argv[2])
    faulthandler.enable()
    with asyncio.Runner() as runner:
        worker = Worker(runner)
        with suppress(EOFError, OSError):  # no more orders will arrive
            while not isinstance((asked := _next_order(channel, worker, idle_seconds)).order, End):
                channel.send_body(worker.answer(asked))
    channel.close()
    _exit_soon()


def _next_order(channel: Channel, worker: Worker, idle_seconds: float) -> NumberedOrder:
    """Wait for the next order. Raises `EOFError` if the channel is closed, or no order has arrived for long."""
    while True:
        try:
            order: NumberedOrder = channel.receive(NumberedOrder, idle_seconds)
            return order
        except TimeoutError:
            if not worker.has_episodes:
                raise EOFError from None


def _exit_soon() -> None:
    """Exit even if a thread of an environment never ends."""
    timer = threading.Timer(_EXIT_SECONDS, os._exit, [0])
    timer.daemon = True
    timer.start()


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _text(reason: str) -> str:
    return one_line(reason).encode(errors="replace").decode()


if __name__ == "__main__":
    main()
