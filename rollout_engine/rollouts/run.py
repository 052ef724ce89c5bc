"""Runs groups, the samples of a prompt and their rewards: starts their requests and collects the finished ones."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress

import msgspec

from rollout_engine.base.errors import EngineGenerateError, LifecycleError, RequestError, RetryableError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.batches.reward_functions import RewardFunctions
from rollout_engine.batches.rewards import RewardCaller, Rewards
from rollout_engine.engine.interrupts import allowed
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.reader import Reader
from rollout_engine.rollouts.plan import GroupTask
from rollout_engine.text.input_processor import at_index
from rollout_engine.text.prompts import adapter_name


class Group(msgspec.Struct, frozen=True):
    """A prompt whose samples have all ended, and their rewards if there is a reward function."""

    task: GroupTask
    output: RequestOutput
    rewards: Rewards | None

    @property
    def index(self) -> int:
        """Index of the prompt."""
        return self.task.index

    @property
    def params(self) -> SamplingParams:
        return self.task.params

    @property
    def lora(self) -> str | None:
        """Name of the adapter that sampled; None: the base alone."""
        return adapter_name(self.task.input)

    @property
    def samples(self) -> list[CompletionOutput]:
        return self.output.outputs

    @property
    def total_rewards(self) -> list[float]:
        """One per sample; empty without a reward function."""
        return self.rewards.total if self.rewards else []

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Lowest policy version among its tokens; None without any."""
        spans = (span for sample in self.output.outputs for span in sample.version_spans)
        return min((span.policy_version for span in spans), default=None)


class RolloutRun:
    """Runs groups: call `advance` until not `unfinished`, and `close` in any case.

    `loop` runs async rewards, as in `RewardCaller`. `keeps_aborted`: groups that an abort cut short are put into
    `aborted`, and nothing is raised. `on_samples` is called with a group whose samples have all ended, before its
    rewards.
    """

    def __init__(
        self,
        frontend: Frontend,
        tasks: Iterable[GroupTask] = (),
        reward_fn: RewardFunctions | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        keeps_aborted: bool = False,
        on_samples: Callable[[GroupTask, RequestOutput], object] = lambda task, output: None,
    ) -> None:
        """`tasks` are started by the first `advance`, all or none."""
        if reward_fn is None and reward_weights is not None:
            raise RequestError.for_field("reward_weights", reward_weights, "absent without reward_fn")
        self._reader, self._waiting = Reader(frontend), list(tasks)
        self._caller = None if reward_fn is None else RewardCaller(reward_fn, loop, reward_weights)
        self._running: dict[str, GroupTask] = {}
        """Task of each unfinished request."""
        self._rewarding: list[tuple[GroupTask, RequestOutput, Future[Rewards]]] = []
        """Finished prompts whose rewards are pending."""
        self.aborted: list[GroupTask] = []
        """Groups that an abort cut short, with the seed that they had; the caller takes them out."""
        self._keeps_aborted, self._cancelled = keeps_aborted, False
        self._on_samples = on_samples
        self._num_taken: dict[str, list[int]] = {}
        """Tokens of each sample of an unfinished request that `take_progress` has returned, or that it began with."""

    @property
    def unfinished(self) -> bool:
        """Whether groups have not been returned yet."""
        return bool(self._waiting or self._running or self._rewarding)

    @property
    def num_groups(self) -> int:
        """Groups in all, before the first `advance`."""
        return len(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether `advance` has something to do at once: it begins, or an output or a reward has arrived."""
        return bool(self._waiting) or self._reader.has_news or any(future.done() for *_, future in self._rewarding)

    @property
    def is_sampling(self) -> bool:
        """Whether the engine samples for it, so that `advance` computes a step if there are no news."""
        return bool(self._running)

    @property
    def num_open_tokens(self) -> int:
        """Tokens sampled so far of groups whose samples have not all ended."""
        return self._reader.num_tokens()

    def start(self, task: GroupTask, begun: Sequence[CompletionOutput] = ()) -> GroupTask:
        """Queue the request of one more group. Returns the task with the seed that its request has got.

        `begun`: tokens that its samples got in an earlier process, from `take_progress`. Raises `RequestError`, naming
        the prompt, when the engine refuses it, and `RewardError` for unfit columns.
        """
        self._check_columns([task])
        try:
            request_id = self._reader.add(task.input, task.params, None, num_kept=task.num_kept, begun=begun)
        except RequestError as error:
            raise at_index("prompts", task.index, error) from error
        self._num_taken[request_id] = taken = [0] * task.params.n
        for part in begun:
            taken[part.index] += len(part.token_ids)
        self._running[request_id] = seeded = task.with_seed(self._reader.seed_of(request_id))
        return seeded

    def advance(self) -> list[Group]:
        """Step the engine once if requests are running. Returns the groups that became complete, rewards included.

        The first call queues the requests and raises `RequestError`, naming the prompt, when the engine refuses one.
        Once only rewards are outstanding, waits for the next of them. Raises `EngineGenerateError` for a failed
        sequence, `RetryableError` for an aborted one, and `RewardError` for a failed reward.
        """
        if self._waiting:
            self._check_columns(self._waiting)
            inputs, params = ([getattr(task, name) for task in self._waiting] for name in ("input", "params"))
            kept, sessions = ([getattr(task, name) for task in self._waiting] for name in ("num_kept", "session_id"))
            request_ids = self._reader.add_all(inputs, params, num_kept=kept, session_id=sessions)
            self._running, self._waiting = dict(zip(request_ids, self._waiting, strict=True)), []
        complete = []
        for output in self._reader.read() if self._running else ():
            task = self._running.pop(output.request_id)
            if self._keeps_aborted and any(sample.finish_reason == "abort" for sample in output.outputs):
                _refuse_endless(task, output)
                self.aborted.append(task)
                continue
            _check_samples(task.index, output)
            self._on_samples(task, output)
            complete += self.reward(task, output)
        return complete + self._take_rewarded()

    def reward(self, task: GroupTask, output: RequestOutput) -> list[Group]:
        """Start the rewards of a group whose samples have all ended; without a reward function it is complete."""
        if self._caller is None:
            return [Group(task, output, None)]
        with allowed():
            rewards = self._caller.start(task.index, task.prompt, output, task.columns)
        self._rewarding.append((task, output, rewards))
        return []

    def take_progress(self, min_tokens: int) -> Iterator[tuple[GroupTask, list[CompletionOutput]]]:
        """Iterate over unfinished groups with a sample that has `min_tokens` more than before, with the new tokens.

        Not over those of which only the first samples to end are returned, or with hidden states: they begin anew.
        """
        for request_id in self._num_taken.keys() - self._running.keys():
            del self._num_taken[request_id]
        for request_id, task in self._running.items():
            taken = self._num_taken.get(request_id)
            if taken is None or task.num_kept is not None or task.params.return_hidden_states is not None:
                continue
            if parts := self._reader.parts(request_id, taken, min_tokens):
                for part in parts:
                    taken[part.index] += len(part.token_ids)
                yield task, parts

    def abort(self, indexes: Collection[int]) -> None:
        """End the unfinished groups of these prompts without a result."""
        ended = [request_id for request_id, task in self._running.items() if task.index in indexes]
        self._reader.abort(ended)
        for request_id in ended:
            del self._running[request_id]
        for task, _, rewards in self._rewarding:
            if task.index in indexes:
                rewards.cancel()
        self._rewarding = [entry for entry in self._rewarding if entry[0].index not in indexes]

    def stop_waiting(self) -> None:
        """Make an `advance` that waits on another thread return at once."""
        self._cancelled = True
        for _, _, rewards in self._rewarding:
            rewards.cancel()

    def close(self) -> None:
        """Abort unfinished requests; no-op if the engine is gone or belongs to another process."""
        self.stop_waiting()
        if self._caller is not None:
            self._caller.close()
        unfinished, self._running, self._rewarding, self._waiting = list(self._running), {}, [], []
        if unfinished:
            with suppress(LifecycleError):
                self._reader.abort(unfinished)

    def _check_columns(self, tasks: Sequence[GroupTask]) -> None:
        """Raise `RewardError` before anything is sampled if columns and reward functions do not fit."""
        if self._caller is not None:
            for columns in {tuple(task.columns) for task in tasks}:
                self._caller.check_columns(columns)

    def _take_rewarded(self) -> list[Group]:
        if self._rewarding and not self._running and not self._cancelled:
            with allowed():
                wait([rewards for _, _, rewards in self._rewarding], return_when=FIRST_COMPLETED)
        if self._cancelled:
            return []
        complete = [Group(task, output, future.result()) for task, output, future in self._rewarding if future.done()]
        done = {group.index for group in complete}
        self._rewarding = [entry for entry in self._rewarding if entry[0].index not in done]
        return complete


def _refuse_endless(task: GroupTask, output: RequestOutput) -> None:
    """Raise `RequestError` for a group that would end at once each time that it was started again."""
    errors = [sample.error for sample in output.outputs if sample.error is not None]
    if errors and task.params.version_wait == "end":
        raise at_index("prompts", task.index, RequestError(errors[0], field="policy_version"))


def _check_samples(index: int, output: RequestOutput) -> None:
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise EngineGenerateError(f"prompts[{index}], sample {sample.index}: {sample.error}")
        if sample.finish_reason == "abort" and sample.error is not None:  # its policy version is past
            raise RetryableError(f"prompts[{index}], sample {sample.index} was cut short: {sample.error}")
        if sample.finish_reason == "abort":
            what = f"aborted after {len(sample.token_ids)} tokens by a pause, sleep or update with mode='abort'"
            advice = "call rollout again once the engine runs; mode='keep' or mode='wait' would not have cut it"
            raise RetryableError(f"prompts[{index}], sample {sample.index} was {what}, or by abort_request: {advice}.")
