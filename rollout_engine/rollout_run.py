"""Runs one rollout: adds its requests, and collects their samples and rewards by group."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress

import msgspec

from rollout_engine.engine.interrupts import allowed
from rollout_engine.errors import EngineGenerateError, LifecycleError, RequestError, RetryableError
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.reader import Reader
from rollout_engine.outputs import RequestOutput
from rollout_engine.reward_functions import RewardFunctions
from rollout_engine.rewards import RewardCaller, Rewards
from rollout_engine.rollout_plan import RolloutPlan


class Group(msgspec.Struct, frozen=True):
    """A prompt whose samples have all ended, and their rewards where there is a reward function."""

    index: int
    """Index of the prompt in the plan."""
    output: RequestOutput
    rewards: Rewards | None

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.output.outputs)


class RolloutRun:
    """Runs the requests of one plan: call `advance` until not `unfinished`, and `close` in any case.

    `loop` runs async rewards, as in `RewardCaller`.
    """

    def __init__(
        self,
        frontend: Frontend,
        plan: RolloutPlan,
        reward_fn: RewardFunctions | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        if reward_fn is None and reward_weights is not None:
            raise RequestError.for_field("reward_weights", reward_weights, "absent without reward_fn")
        self._reader, self._plan = Reader(frontend), plan
        self._caller = None if reward_fn is None else RewardCaller(reward_fn, loop, reward_weights)
        self._running: dict[str, int] = {}
        """Index of the prompt of each unfinished request."""
        self._rewarding: list[tuple[int, RequestOutput, Future[Rewards]]] = []
        """Finished prompts whose rewards are still to come."""
        self._started = self._cancelled = False

    @property
    def unfinished(self) -> bool:
        """Whether groups are still to come."""
        return not self._started or bool(self._running or self._rewarding)

    @property
    def num_open_tokens(self) -> int:
        """Tokens sampled so far of groups whose samples have not all ended."""
        return self._reader.num_tokens()

    def advance(self) -> list[Group]:
        """Step the engine once if requests are running. Returns the groups that became complete, rewards included.

        The first call queues the requests and raises `RequestError`, naming the prompt, when the engine refuses one.
        Once only rewards are outstanding, waits for the next of them. Raises `EngineGenerateError` for a failed
        sequence, `RetryableError` for an aborted one, and `RewardError` for a failed reward.
        """
        if not self._started:
            request_ids = self._reader.add_all(self._plan.inputs, self._plan.params)
            self._running = {request_id: i for i, request_id in enumerate(request_ids)}
            self._started = True
        complete = []
        for output in self._reader.read() if self._running else ():
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
        """Make an `advance` that waits for rewards on another thread return at once."""
        self._cancelled = True
        for _, _, rewards in self._rewarding:
            rewards.cancel()

    def close(self) -> None:
        """Abort unfinished requests; no-op where the engine is gone or belongs to another process."""
        self.cancel_rewards()
        if self._caller is not None:
            self._caller.close()
        unfinished, self._running, self._rewarding, self._started = list(self._running), {}, [], True
        if unfinished:
            with suppress(LifecycleError):
                self._reader.abort(unfinished)

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
