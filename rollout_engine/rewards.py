"""The user's reward functions: called once per finished group, their answers checked and summed.

A plain function runs where it is called. The coroutine of an async one runs on an event loop, so that judges that wait
(for a server, say) overlap with generation and with one another.
"""

import asyncio
import logging
import math
import numbers
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from inspect import isawaitable, iscoroutine
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rollout_engine.errors import RewardError
from rollout_engine.frontend.conversations import is_conversation
from rollout_engine.outputs import RequestOutput
from rollout_engine.reward_functions import (
    RewardCall,
    RewardFunctions,
    check_columns,
    is_listed,
    reward_calls,
    weighted_sum,
)

logger = logging.getLogger("rollout_engine")

END_SECONDS = 5.0
"""How long a coroutine may take to end once it is cancelled."""

_COPIED = (list, dict, set, bytearray, np.ndarray, Tensor)
"""Kinds of values that a reward function might write to. Objects of the user's own classes are passed as they are."""


class Rewards(NamedTuple):
    """Rewards of one group."""

    total: list[float]
    """One per sample: weight times reward, summed over the functions that apply."""
    by_function: dict[str, list[float | None]]
    """Name -> one per sample, None where it does not apply; empty where there is one function only."""


class RewardCaller:
    """Calls the reward functions and turns whatever happens into a future: finite rewards, or `RewardError`.

    `loop` runs coroutines and belongs to another thread; None starts a private one when it is first needed.
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
        self._private: _LoopThread | None = None

    def start(self, group: int, prompt: object, output: RequestOutput, columns: Mapping[str, Any]) -> Future[Rewards]:
        """Rewards of the finished group number `group`; `columns` holds its one value of each column."""
        num, rewards, answers = len(output.outputs), Future[Rewards](), list[Any]()
        try:
            check_columns(self._calls, columns)
            for call in self._calls:
                answers.append(self._called(call, group, prompt, output, columns))
            if any(isawaitable(answer) for answer in answers):
                return asyncio.run_coroutine_threadsafe(self._finished(answers, num, group), self._running_loop())
            rewards.set_result(self._summed(answers, num, group))
        except Exception as problem:
            for answer in answers:
                if iscoroutine(answer):
                    answer.close()
            rewards.set_exception(_as_reward_error(problem, group))
        return rewards

    def _called(
        self, call: RewardCall, group: int, prompt: object, output: RequestOutput, columns: Mapping[str, Any]
    ) -> Any:
        """Call one function with copies of its own."""
        num, texts = len(output.outputs), [sample.text for sample in output.outputs]
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        arguments = {
            "prompts": _copies(prompt, num),
            "completions": messages if is_conversation(prompt) else texts,
            "completion_ids": [sample.token_ids.copy() for sample in output.outputs],
        }
        try:
            return call(arguments, {name: _copies(value, num) for name, value in columns.items()})
        except Exception as problem:
            raise _as_reward_error(problem, group, self._label(call)) from problem

    async def _finished(self, answers: list[Any], num: int, group: int) -> Rewards:
        """The rewards once all that must be waited for is there."""

        async def value(call: RewardCall, answer: Any) -> Any:
            try:
                return await answer if isawaitable(answer) else answer
            except (Exception, SystemExit) as problem:  # an exit would end the loop under the other groups
                raise _as_reward_error(problem, group, self._label(call)) from problem

        pairs = zip(self._calls, answers, strict=True)
        return self._summed(await asyncio.gather(*(value(*pair) for pair in pairs)), num, group)

    def _summed(self, answers: Sequence[Any], num: int, group: int) -> Rewards:
        pairs = zip(self._calls, answers, strict=True)
        each = [_checked(answer, num, group, self._label(call)) for call, answer in pairs]
        names = [call.name for call in self._calls]
        by_function = dict(zip(names, each, strict=True)) if self._is_list else {}
        return Rewards(weighted_sum(self._calls, each, group), by_function)

    def _label(self, call: RewardCall) -> str:
        return f"the reward function '{call.name}'" if self._is_list else "the reward function"

    def close(self) -> None:
        """End the private loop, cancelling what still runs on it."""
        if self._private is not None:
            self._private.close("the reward function " + ", ".join(call.name for call in self._calls))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._private = _LoopThread()
            self._loop = self._private.loop
        return self._loop


class _LoopThread:
    """An event loop running in a thread of its own."""

    def __init__(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), name="rewards", daemon=True)
        self._thread.start()
        started.wait()

    def close(self, what: str) -> None:
        """Cancel what runs. A coroutine that blocks the loop goes on in its thread; a warning names it by `what`."""
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s blocks its event loop and was left running: `await` what it waits for", what)

    async def _main(self, started: threading.Event) -> None:
        self.loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._ended.wait()


def _copies(value: Any, num: int) -> list[Any]:
    """One copy of `value` for each of `num` samples."""
    return [deepcopy(value) if isinstance(value, _COPIED) else value for _ in range(num)]


def _checked(answer: object, num: int, group: int, label: str) -> list[float | None]:
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        what = f"returned {type(answer).__name__}, not a list of {num} numbers"
        raise RewardError(f"prompts[{group}]: {label} {what}.")
    values = list(answer)
    if len(values) != num:
        raise RewardError(f"prompts[{group}]: {label} returned {len(values)} rewards, not {num}.")
    return [None if value is None else _number(value, group, i) for i, value in enumerate(values)]


def _number(value: Any, group: int, index: int) -> float:
    plain = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise RewardError(f"prompts[{group}], sample {index}: the reward is {plain!r:.80}, not a finite number.")
    return float(plain)


def _as_reward_error(problem: BaseException, group: int, label: str = "the reward function") -> RewardError:
    if isinstance(problem, RewardError):
        return problem
    error = RewardError(f"prompts[{group}]: {label} raised {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error
