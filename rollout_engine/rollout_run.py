"""One rollout in progress: its requests, from adding them to the last rewarded group."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

import msgspec

from rollout_engine.errors import EngineGenerateError, LifecycleError, RequestError, RetryableError
from rollout_engine.frontend.blocking_engine import Inbox, SharedStreams
from rollout_engine.frontend.engine_lock import EngineLock
from rollout_engine.frontend.interrupts import allowed
from rollout_engine.frontend.lifecycle_control import PAUSED_POLL_SECONDS
from rollout_engine.frontend.llm_engine import LLMEngine
from rollout_engine.outputs import RequestOutput
from rollout_engine.reward_functions import RewardFunctions
from rollout_engine.rewards import RewardCaller, Rewards
from rollout_engine.rollout_plan import RolloutPlan
from rollout_engine.sampling_params import SamplingParams


class Group(msgspec.Struct, frozen=True):
    """A prompt whose samples have all ended, and their rewards where there is a reward function."""

    index: int
    """Which prompt of the plan."""
    output: RequestOutput
    rewards: Rewards | None

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.output.outputs)


class SharedEngine:
    """An engine that several rollouts step: one step at a time, every result to the rollout that asked for it."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._stepping = EngineLock()
        self._owners: dict[str, Inbox] = {}

    def add(self, prompts: list[Any], params: list[SamplingParams], inbox: Inbox) -> list[str]:
        """Queue requests whose finished results go to `inbox`; all of them, or none and a `RequestError`."""
        with self._stepping:
            request_ids = self.engine.add_requests(prompts, params)
            self._owners.update(dict.fromkeys(request_ids, inbox))
        return request_ids

    def step_for(self, inbox: Inbox) -> None:
        """One engine step, unless another rollout's step has filled `inbox` while we waited for our turn.

        While the engine is paused or asleep it takes a moment and computes nothing.
        """
        self.engine.wait_until_steppable(PAUSED_POLL_SECONDS)
        with self._stepping:
            if inbox.results:
                return
            outputs = self.engine.step()
            foreign = [output for output in outputs if output.request_id not in self._owners]
            if foreign:
                self.engine.hand_back(foreign)
            for output in outputs:
                if output.finished and output.request_id in self._owners:
                    self._owners.pop(output.request_id).results.append(output)
            own = (request_id for request_id, owner in self._owners.items() if owner is inbox)
            if not inbox.results and not any(self.engine.is_unfinished(request_id) for request_id in own):
                raise EngineGenerateError("Results of a rollout were taken by another caller of the engine's step().")

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """Tokens that these requests have so far; 0 for those whose finished output is there."""
        return self.engine.num_tokens(request_ids)

    def abort(self, request_ids: list[str]) -> None:
        """End requests without a result."""
        with self._stepping:
            for request_id in request_ids:
                self._owners.pop(request_id, None)
            self.engine.abort_request(request_ids, discard=True)


class RolloutRun:
    """The requests of one plan: `advance` until not `unfinished`, and `close` in any case.

    `loop` runs async rewards, see `RewardCaller`.
    """

    def __init__(
        self,
        engine: SharedEngine | SharedStreams,
        plan: RolloutPlan,
        reward_fn: RewardFunctions | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        if reward_fn is None and reward_weights is not None:
            raise RequestError.for_field("reward_weights", reward_weights, "absent without reward_fn")
        self._engine, self._plan = engine, plan
        self._caller = None if reward_fn is None else RewardCaller(reward_fn, loop, reward_weights)
        self._running: dict[str, int] = {}
        self._inbox = Inbox()
        self._rewarding: list[tuple[int, RequestOutput, Future[Rewards]]] = []
        self._started = self._cancelled = False

    @property
    def unfinished(self) -> bool:
        """Whether groups are still to come."""
        return not self._started or bool(self._running or self._rewarding)

    @property
    def num_open_tokens(self) -> int:
        """Tokens sampled so far of groups whose samples have not all ended."""
        return self._engine.num_tokens(self._running)

    def advance(self) -> list[Group]:
        """Step the engine once if it has work for us; return the groups that became complete, rewards included.

        The first call queues the requests and raises `RequestError`, naming the prompt, when the engine refuses one.
        Once only rewards are outstanding, waits for the next of them. Raises `EngineGenerateError` for a failed
        sequence, `RetryableError` for an aborted one, and `RewardError` for a failed reward.
        """
        if not self._started:
            request_ids = self._engine.add(self._plan.inputs, self._plan.params, self._inbox)
            self._running = {request_id: i for i, request_id in enumerate(request_ids)}
            self._started = True
        if self._running:
            self._engine.step_for(self._inbox)
        complete = []
        while self._inbox.results:
            output = self._inbox.results.pop()
            index = self._running.pop(output.request_id)
            _check_samples(index, output)
            if self._caller is None:
                complete.append(Group(index, output, None))
            else:
                with allowed():
                    rewards = self._caller.start(index, self._plan.prompts[index], output, self._plan.row(index))
                self._rewarding.append((index, output, rewards))
        return complete + self._rewarded()

    def cancel_rewards(self) -> None:
        """Make an `advance` that waits for rewards in another thread return at once."""
        self._cancelled = True
        for _, _, rewards in self._rewarding:
            rewards.cancel()

    def close(self) -> None:
        """Abort what is unfinished; nothing where the engine is gone, or another process's."""
        self.cancel_rewards()
        if self._caller is not None:
            self._caller.close()
        unfinished, self._running, self._rewarding, self._started = list(self._running), {}, [], True
        if unfinished:
            with suppress(LifecycleError):
                self._engine.abort(unfinished)

    def _rewarded(self) -> list[Group]:
        if self._rewarding and not self._running and not self._cancelled:
            with allowed():
                wait([rewards for _, _, rewards in self._rewarding], return_when=FIRST_COMPLETED)
        if self._cancelled:
            return []
        complete = [Group(i, output, rewards.result()) for i, output, rewards in self._rewarding if rewards.done()]
        done = {group.index for group in complete}
        self._rewarding = [entry for entry in self._rewarding if entry[0] not in done]
        return complete


def _check_samples(index: int, output: RequestOutput) -> None:
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise EngineGenerateError(f"prompts[{index}], sample {sample.index}: {sample.error}")
        if sample.finish_reason == "abort":
            what = f"aborted after {len(sample.token_ids)} tokens by a pause, sleep or update with mode='abort'"
            advice = "call rollout again once the engine runs; mode='keep' or mode='wait' would not have cut it"
            raise RetryableError(f"prompts[{index}], sample {sample.index} was {what}, or by abort_request: {advice}.")
