"""The user's reward function: called once per finished group, its answer checked.

A plain function runs where it is called. The coroutine of an async one runs on an event loop, so that judges that wait
(for a server, say) overlap with generation and with one another.
"""

import asyncio
import logging
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from inspect import isawaitable
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from rollout_engine.errors import RewardError
from rollout_engine.outputs import RequestOutput

logger = logging.getLogger("rollout_engine")

END_SECONDS = 5.0
"""How long a coroutine may take to end once it is cancelled."""

RewardFunction: TypeAlias = Callable[..., Iterable[float] | Awaitable[Iterable[float]]]
"""`reward_fn(prompts, completions, completion_ids, **columns)`: lists of the group's size in, one number each out.

The lists, and lists, dicts, sets, arrays and tensors in them, are copies: what a function writes there reaches nobody.
"""

_COPIED = (list, dict, set, bytearray, np.ndarray, Tensor)
"""What a reward function might write to. Objects of the user's own classes are passed as they are."""


class RewardCaller:
    """Calls one reward function and turns whatever happens into a future: finite rewards, or `RewardError`.

    `loop` runs coroutines and belongs to another thread; None starts a private one when it is first needed.
    """

    def __init__(self, reward_fn: RewardFunction, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._reward_fn = reward_fn
        self._loop = loop
        self._private: _LoopThread | None = None

    def start(
        self, group: int, prompt: object, output: RequestOutput, columns: Mapping[str, Any]
    ) -> Future[list[float]]:
        """Rewards of the finished group number `group`; `columns` holds its one value of each column."""
        num, rewards = len(output.outputs), Future[list[float]]()
        try:
            answer = self._reward_fn(
                _copies(prompt, num),
                [sample.text for sample in output.outputs],
                [sample.token_ids.copy() for sample in output.outputs],
                **{name: _copies(value, num) for name, value in columns.items()},
            )
            if isawaitable(answer):
                return asyncio.run_coroutine_threadsafe(_checked_later(answer, num, group), self._running_loop())
            rewards.set_result(_checked(answer, num, group))
        except Exception as problem:
            rewards.set_exception(_as_reward_error(problem, group))
        return rewards

    def close(self) -> None:
        """End the private loop, cancelling what still runs on it."""
        if self._private is not None:
            self._private.close(
                f"the reward function {getattr(self._reward_fn, '__qualname__', self._reward_fn)!s:.80}"
            )

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


async def _checked_later(answer: Awaitable[Any], num: int, group: int) -> list[float]:
    try:
        return _checked(await answer, num, group)
    except RewardError:
        raise
    except (Exception, SystemExit) as problem:  # an exit would end the loop under the other groups
        raise _as_reward_error(problem, group) from problem


def _checked(answer: object, num: int, group: int) -> list[float]:
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        what = f"returned {type(answer).__name__}, not a list of {num} numbers"
        raise RewardError(f"prompts[{group}]: the reward function {what}.")
    values = list(answer)
    if len(values) != num:
        raise RewardError(f"prompts[{group}]: the reward function returned {len(values)} rewards, not {num}.")
    return [_number(value, group, i) for i, value in enumerate(values)]


def _number(value: Any, group: int, index: int) -> float:
    plain = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise RewardError(f"prompts[{group}], sample {index}: the reward is {plain!r:.80}, not a finite number.")
    return float(plain)


def _as_reward_error(problem: BaseException, group: int) -> RewardError:
    if isinstance(problem, RewardError):
        return problem
    error = RewardError(f"prompts[{group}]: the reward function raised {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error
