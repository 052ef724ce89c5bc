"""Calls the user's reward functions once per finished group, checks their results and sums them.

A plain function runs in the calling thread. The coroutine of an async one runs on an event loop, so that functions that
wait (for a server, say) overlap with generation and with one another.
"""

import asyncio
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from inspect import CORO_CREATED, getcoroutinestate, isawaitable, iscoroutine
from typing import Any, NamedTuple

from rollout_engine.base.errors import RewardError, error_text
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.threads import start_thread
from rollout_engine.batches.reward_functions import (
    PICTURES,
    RewardCall,
    RewardFunctions,
    check_columns,
    checked_rewards,
    copies,
    is_listed,
    reward_arguments,
    reward_calls,
    weighted_sum,
)
from rollout_engine.text.conversations import is_conversation

logger = logging.getLogger("rollout_engine")

_RAISED = (Exception, SystemExit)
"""A reward function's own fault: an exit would end the training, or the loop of other groups."""
END_SECONDS = 5.0
"""Time for coroutines to end once they are cancelled."""


class Rewards(NamedTuple):
    """Rewards of one group."""

    total: list[float]
    """One per sample: weight times reward, summed over the functions that apply."""
    by_function: dict[str, list[float | None]]
    """Name -> one per sample, None if the function does not apply; empty if a single function was given."""


class RewardCaller:
    """Calls the reward functions; every result is a future with finite rewards or a `RewardError`.

    `loop` runs coroutines in another thread; None starts a private one when it is first needed.
    """

    def __init__(
        self,
        reward_fn: RewardFunctions,
        loop: asyncio.AbstractEventLoop | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._calls = reward_calls(reward_fn, weights)
        self._is_list = is_listed(reward_fn)
        self._loop = loop
        self._thread: _LoopThread | None = None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `RewardError` for columns that do not fit the functions. Call it before anything is sampled."""
        check_columns(self._calls, columns)

    def start(self, group: int, prompt: object, output: RequestOutput, columns: Mapping[str, Any]) -> Future[Rewards]:
        """Start computing the rewards of a finished group, number `group`; `columns` holds its value of each column."""
        num, rewards, answers = len(output.outputs), Future[Rewards](), list[Any]()
        try:
            for call in self._calls:
                answers.append(self._call(call, group, prompt, output, columns))
            if any(map(isawaitable, answers)):
                loop = self._event_loop()
                awaited = asyncio.run_coroutine_threadsafe(self._await(answers, num, group), loop)
                awaited.add_done_callback(lambda done: _close_unstarted(answers, loop) if done.cancelled() else None)
                return awaited
            rewards.set_result(self._sum(answers, num, group))
        except _RAISED as problem:
            for answer in filter(iscoroutine, answers):
                answer.close()
            rewards.set_exception(_as_reward_error(problem, group))
        return rewards

    def _call(
        self, call: RewardCall, group: int, prompt: object, output: RequestOutput, columns: Mapping[str, Any]
    ) -> Any:
        """Call one function with its own copies of the arguments."""
        texts, token_ids = [sample.text for sample in output.outputs], [sample.token_ids for sample in output.outputs]
        arguments = reward_arguments(prompt, texts, token_ids, is_chat=is_conversation(prompt))
        if output.pictures or call.names(PICTURES):
            arguments[PICTURES] = [tuple(output.pictures) for _ in texts]
        try:
            return call(arguments, {name: copies(value, len(texts)) for name, value in columns.items()})
        except _RAISED as problem:
            raise _as_reward_error(problem, group, self._label(call)) from problem

    async def _await(self, answers: list[Any], num: int, group: int) -> Rewards:
        """Await all coroutines, then return the rewards."""

        async def value(call: RewardCall, answer: Any) -> Any:
            try:
                return await answer if isawaitable(answer) else answer
            except _RAISED as problem:
                raise _as_reward_error(problem, group, self._label(call)) from problem

        return self._sum(await asyncio.gather(*map(value, self._calls, answers)), num, group)

    def _sum(self, answers: Sequence[Any], num: int, group: int) -> Rewards:
        pairs, where = zip(self._calls, answers, strict=True), f"prompts[{group}]"
        checked = {}
        for call, answer in pairs:
            try:
                checked[call.name] = checked_rewards(answer, num, where, self._label(call))
            except _RAISED as problem:  # a generator runs only now
                raise _as_reward_error(problem, group, self._label(call)) from problem
        total = weighted_sum(self._calls, list(checked.values()), where)
        return Rewards(total, checked if self._is_list else {})

    def _label(self, call: RewardCall) -> str:
        return f"the reward function '{call.name}'" if self._is_list else "the reward function"

    def close(self) -> None:
        """End the private loop and cancel its coroutines."""
        if self._thread is not None:
            self._thread.close("the reward function " + ", ".join(call.name for call in self._calls))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._thread = _LoopThread()
            self._loop = self._thread.loop
        return self._loop


class _LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        started = threading.Event()
        self._thread = start_thread(lambda: asyncio.run(self._main(started)), name="rewards")
        started.wait()

    def close(self, what: str) -> None:
        """Cancel all coroutines. One that blocks the loop keeps running; a warning then names it by `what`."""
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s blocks its event loop and was left running: it should `await` instead of blocking", what)

    async def _main(self, started: threading.Event) -> None:
        self.loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._ended.wait()


def _close_unstarted(answers: list[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Close the coroutines of a cancelled call that have not begun, on their own thread."""

    def close() -> None:
        for answer in filter(iscoroutine, answers):
            if getcoroutinestate(answer) == CORO_CREATED:
                answer.close()

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(close)


def _as_reward_error(problem: BaseException, group: int, label: str = "the reward function") -> RewardError:
    if isinstance(problem, RewardError):
        return problem
    error = RewardError(f"prompts[{group}]: {label} raised {error_text(problem)}")
    error.__cause__ = problem
    return error
