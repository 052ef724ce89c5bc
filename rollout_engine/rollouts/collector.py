"""Collects a trainer's batches from a dataset while unfinished groups stay in flight over weight updates."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import msgspec

from rollout_engine.base.errors import EngineDeadError, LifecycleError, RequestError, RetryableError
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.sampling_params import as_sampling_params
from rollout_engine.batches.summary import RolloutBatch
from rollout_engine.engine.interrupts import allowed, deliver, held
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.agents.agent import Agent, as_agent
from rollout_engine.rollouts.agents.collecting import AgentGroups, agent_tasks, collecting_plan
from rollout_engine.rollouts.agents.episode import AgentGroup
from rollout_engine.rollouts.agents.gateway_seam import AgentGateway
from rollout_engine.rollouts.groups import GroupBatcher, GroupListeners
from rollout_engine.rollouts.journal.group_records import Recalled
from rollout_engine.rollouts.journal.groups import GroupJournal
from rollout_engine.rollouts.journal.identity import open_group_journal
from rollout_engine.rollouts.journal.position import position_of, row_digest, state_of
from rollout_engine.rollouts.journal.rows import pictures_of, read_open_tasks
from rollout_engine.rollouts.plan import GroupTask, RolloutArguments, as_int, row_tasks
from rollout_engine.rollouts.run import Group, RolloutRun
from rollout_engine.rollouts.staleness import StalenessControl
from rollout_engine.rollouts.teachers import TeacherColumns

_MAX_COUNT = 1_000_000


class CollectorStats(msgspec.Struct):
    """Counts of a collector so far."""

    num_started: int = 0
    """Groups started, again or for the first time."""
    num_delivered: int = 0
    """Groups in the batches that were returned."""
    num_regenerated: int = 0
    """Groups started again with the same seeds: too old for any batch, or cut short by an abort."""
    num_dropped: int = 0
    """Samples of delivered groups that were started and dropped (`oversample`)."""
    num_running: int = 0
    """Groups in flight now."""
    num_complete: int = 0
    """Complete groups that wait for the next batch."""


class RolloutCollector:
    """An iterator over batches of finished groups, made by `RolloutPolicy.collect`.

    Each group of the dataset is delivered exactly once, whatever its length: a group that is unfinished when a batch
    is ready continues, over weight updates too, and is part of a later batch. After leaving the loop, `next` continues
    from there. `close`, or the end of a `with` block, aborts the groups in flight; so does any error that `next`
    raises, other than `LifecycleError` and `RetryableError` while the engine is paused or asleep: then call it again
    later. One thread at a time may call `next`.

    A trainer that writes checkpoints puts `state_dict` into them; `load_state_dict` continues from there. With a
    journal (`collect(journal=...)`) the samples of unfinished and later groups are kept, too.
    """

    def __init__(
        self,
        frontend: Frontend,
        batcher: GroupBatcher,
        arguments: RolloutArguments,
        tasks: Iterator[GroupTask],
        control: StalenessControl,
        listeners: GroupListeners,
        journal: GroupJournal,
        teachers: TeacherColumns | None = None,
        agents: AgentGroups | None = None,
    ) -> None:
        """`tasks`: those of the dataset, from its first row. `journal`: keeps the position, and the groups.

        `agents`: play the tasks; None: they are prompts.
        """
        frontend.require_own_process()
        self._frontend, self._batcher, self._tasks, self._control = frontend, batcher, tasks, control
        self._listeners, self._layout, weights = listeners, arguments.layout, arguments.reward_weights
        self._teachers, self._journal = teachers, journal
        self._run: RolloutRun | AgentGroups = agents or RolloutRun(
            frontend,
            (),
            arguments.reward_fn,
            reward_weights=weights,
            keeps_aborted=True,
            on_samples=lambda task, output: journal.note_samples(task.index, output),
        )
        self._open: dict[int, GroupTask] = {}
        """Groups that were started and not delivered, with their seeds."""
        self._groups: dict[int, Group | AgentGroup] = {}
        """The complete ones among them."""
        self._digests: dict[int, list[bytes]] = {}
        """Group -> digests of its prompt's pictures, as far as they were read."""
        self._next: deque[GroupTask] = deque()
        """Groups to start before those that the dataset has next."""
        self._problem: Exception | None = None
        """An error raised after a batch was ready."""
        self._has_begun = self._is_exhausted = self._is_closed = self._is_ended = False
        self._busy = threading.Lock()

    @property
    def stats(self) -> CollectorStats:
        """Counts so far, those of earlier processes included if there is a journal or a state was loaded."""
        now = {"num_running": len(self._control.running), "num_complete": len(self._control.complete)}
        return CollectorStats(**msgspec.structs.asdict(self._journal.position.counts), **now)

    def state_dict(self) -> dict[str, Any]:
        """The position in the dataset, and the groups in flight with their seeds, as plain data for a checkpoint.

        Batches that `next` has returned are behind it. Raises `LifecycleError` while `next` runs.
        """
        with self._use():
            return state_of(self._journal.position, self._journal.identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a `state_dict`, before the first `next`.

        Groups that were in flight begin anew with their seeds. With a journal those that it holds continue, and
        batches that were delivered behind the position are delivered again, as far as the live weights allow it.
        Raises `RequestError` for another run's state, and `LifecycleError` after the first `next`.
        """
        with self._use():
            if self._has_begun:
                raise LifecycleError("load_state_dict: call it before the first next() of a collector.")
            self._journal.load(position_of(state, self._journal.identity))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RolloutBatch:
        """Wait for the next batch, then start as much as may run while the trainer works on it."""
        with self._use():
            if self._is_closed:
                raise LifecycleError("This collector is closed; policy.collect makes a new one.")
            try:
                self._frontend.require_running("collect")
            except EngineDeadError:
                self.close()
                raise
            try:
                with held():
                    return self._collect()
            except StopIteration:
                self._close()
                raise
            except RetryableError:
                raise
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Abort the groups in flight. Calling it again is a no-op."""
        with held():
            self._close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Keep other calls out. Raises `LifecycleError` if one is running."""
        if not self._busy.acquire(blocking=False):
            raise LifecycleError("This collector is already collecting, on another thread or in a call from its own.")
        try:
            yield
        finally:
            self._busy.release()

    def _collect(self) -> RolloutBatch:
        if self._problem is not None:
            raise self._problem
        if not self._has_begun:
            self._continue()
            self._has_begun = True
        while True:
            deliver()
            self._renew()
            self._refill(waiting=True)
            taken = self._control.take(is_last=self._is_exhausted and not self._next)
            if taken:
                return self._deliver(taken)
            if not self._open:
                raise StopIteration
            for group in self._run.advance():
                self._complete(group)
            if self._journal.options is not None:
                for task, parts in self._run.take_progress(self._journal.options.progress_tokens):
                    self._journal.note_progress(task.index, parts, self._picture_digests(task))

    def _continue(self) -> None:
        """Read the dataset up to the position of an earlier process, whose open groups start next."""
        self._journal.observe()
        self._journal.drop_unfit()
        position = self._journal.position
        if position.num_batches:
            self._control.restore(position.version, position.num_pending)
        with allowed():
            self._next.extend(read_open_tasks(self._tasks, position))

    def _renew(self) -> None:
        """Put the groups that are too old, or were aborted, before those to start next."""
        self._journal.observe()
        too_old = self._control.observe(self._frontend.client.policy_version)
        self._run.abort(too_old)
        aborted = [task.index for task in self._run.aborted]
        self._run.aborted.clear()
        self._control.forget(aborted)
        again = sorted({*too_old, *aborted})
        for index in again:
            self._groups.pop(index, None)
        self._next.extendleft(reversed([self._open.pop(index) for index in again]))
        self._journal.forget(again)
        self._frontend.streams.stats.regenerated_groups += len(again)

    def _refill(self, *, waiting: bool) -> None:
        """Start as many groups as may be open."""
        while self._control.num_to_start(waiting=waiting) and self._has_next():
            recalled = self._journal.recall(self._next[0], partial(self._picture_digests, self._next[0]))
            try:
                if recalled is None or recalled.output is None:
                    task = self._run.start(self._next[0], [] if recalled is None else recalled.parts)
                else:
                    task = self._next[0]
            except RetryableError:  # the engine is paused and turns requests away
                if waiting and not self._control.running:
                    raise
                return
            self._open[task.index] = task
            self._next.popleft()
            self._control.note_start(task.index)
            self._journal.note_start(task, row_digest(task), recalled=recalled is not None)
            if recalled is not None and recalled.output is not None:
                self._recall(task, recalled, recalled.output)

    def _picture_digests(self, task: GroupTask) -> list[bytes]:
        """Digests of the pictures of a prompt, which are read once."""
        known = self._digests.get(task.index)
        if known is None:
            known = self._digests[task.index] = [each.picture.digest for each in pictures_of(self._frontend, task)]
        return known

    def _recall(self, task: GroupTask, recalled: Recalled, output: RequestOutput) -> None:
        """Take a group whose samples an earlier process had, and perhaps its rewards."""
        output.pictures = pictures_of(self._frontend, task)
        if recalled.is_complete:
            self._note_complete(Group(task, output, recalled.rewards))
            return
        for group in self._run.reward(task, output):
            self._complete(group)

    def _has_next(self) -> bool:
        """Whether there is a group to start; `_next` then has it."""
        if not self._next and not self._is_exhausted:
            with allowed():
                task = next(self._tasks, None)
            self._is_exhausted = task is None
            self._next.extend([] if task is None else [task])
        return bool(self._next)

    def _complete(self, group: Group | AgentGroup) -> None:
        self._note_complete(group)
        self._batcher.tell(self._listeners, group, self._layout)
        self._journal.note_completion(group.index, group.rewards if isinstance(group, Group) else None)

    def _note_complete(self, group: Group | AgentGroup) -> None:
        self._groups[group.index] = group
        self._control.note_completion(group.index, group.oldest_version)

    def _deliver(self, indexes: list[int]) -> RolloutBatch:
        """Make the batch of these groups, and start the groups that may run until the next call."""
        groups = [self._groups[index] for index in sorted(indexes)]
        batch = self._batcher.batch(groups, self._layout)
        if self._teachers is not None:
            self._teachers.add_to(batch, groups)
        self._batcher.count_staleness(groups)
        for group in groups:
            del self._groups[group.index], self._open[group.index]
            self._digests.pop(group.index, None)
        num_dropped = sum(group.output.num_dropped for group in groups if isinstance(group, Group))
        self._journal.deliver(sorted(indexes), num_pending=self._control.num_pending, num_dropped=num_dropped)
        try:
            self._refill(waiting=False)
        except Exception as problem:
            self._problem = problem  # the batch is returned first
        return batch

    def _close(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        self._journal.close()
        self._run.close()
        self._control.forget([*self._open])
        self._open.clear()
        self._groups.clear()
        self._next.clear()
        self._is_exhausted = True


def open_collector(
    frontend: Frontend,
    batcher: GroupBatcher,
    arguments: RolloutArguments,
    control: StalenessControl,
    listeners: GroupListeners,
    journal: Any,
    teachers: TeacherColumns | None,
    gateway: Callable[..., AgentGateway],
) -> RolloutCollector:
    """Make a collector over a dataset, `arguments.prompts`, or over the tasks of an agent.

    `journal`: that of `RolloutPolicy.collect`; `gateway`: `RolloutPolicy.gateway`. Raises `RequestError` for arguments
    that do not fit, and for a journal that cannot be used or holds another run.
    """
    agent = as_agent(arguments.options.get("env"))
    if agent is not None:
        _refuse_journal(journal)
        return _open_agent_collector(frontend, batcher, arguments, control, listeners, teachers, agent, gateway)
    if teachers is not None:
        teachers.check([as_sampling_params(arguments.sampling_params)], None)
    row_tasks(arguments)  # checks them before the journal is opened
    groups, arguments = open_group_journal(frontend, arguments, journal)
    try:
        tasks = row_tasks(arguments)
        return RolloutCollector(frontend, batcher, arguments, tasks, control, listeners, groups, teachers)
    except BaseException:
        groups.close()
        raise


def _open_agent_collector(
    frontend: Frontend,
    batcher: GroupBatcher,
    arguments: RolloutArguments,
    control: StalenessControl,
    listeners: GroupListeners,
    teachers: TeacherColumns | None,
    agent: Agent,
    gateway: Callable[..., AgentGateway],
) -> RolloutCollector:
    plan = collecting_plan(frontend, arguments, agent)
    if teachers is not None:
        teachers.refuse_prompts("Agents have prompts of their own.")
        teachers.check([plan.params], {})
    options = {name: value for name, value in arguments.options.items() if name != "env"} | {"env": agent.name}
    shown = msgspec.structs.replace(arguments, seed=plan.seed, sampling_params=plan.params, options=options)
    groups, _ = open_group_journal(frontend, shown, None)
    agents = AgentGroups(plan, gateway, most_failed=control.groups_per_batch)
    tasks = agent_tasks(arguments.prompts, plan)
    return RolloutCollector(frontend, batcher, arguments, tasks, control, listeners, groups, teachers, agents)


def _refuse_journal(journal: Any) -> None:
    if journal is not None:
        hint = "A program cannot be continued in its middle: collector.state_dict() begins groups in flight anew."
        raise RequestError.for_field("journal", journal, "absent with env=Agent(...)", hint)


def staleness_control(groups_per_batch: Any, max_staleness: Any, max_in_flight: Any) -> StalenessControl:
    """Check the arguments of `RolloutPolicy.collect` that a `StalenessControl` takes. Raises `RequestError`."""
    size = as_int("groups_per_batch", groups_per_batch, 1, _MAX_COUNT)
    if size is None:
        raise RequestError.for_field("groups_per_batch", None, f"an int in [1, {_MAX_COUNT}]")
    staleness = as_int("max_staleness", max_staleness, 0, _MAX_COUNT)
    return StalenessControl(size, staleness, as_int("max_in_flight", max_in_flight, 1, _MAX_COUNT))
