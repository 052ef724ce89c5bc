"""The last steps and calls of a core, kept by reference: a core that dies writes them to a file."""

import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from rollout_engine.base.errors import error_text
from rollout_engine.base.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerOutput,
    SequenceEnd,
)
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.core.step import Step

_NUM_ENTRIES = 1024
"""Entries after which a generation of the history ends. The last two generations are kept."""


class Added(NamedTuple):
    """A request came."""

    at: float
    """`time.monotonic`, as everywhere here."""
    request: EngineCoreRequest


class Called(NamedTuple):
    """A method of the core was called, or a verb of the engine (`is_verb`)."""

    at: float
    name: str
    arguments: tuple[Any, ...]
    is_verb: bool = False


class Scheduled(NamedTuple):
    """A step was scheduled."""

    step: int
    policy_version: int
    rows: "array[int]"
    """Sequence id, tokens computed before and tokens scheduled, of each row."""
    samples: "array[int]"
    """Sequence ids."""


class Stepped(NamedTuple):
    """A call of `EngineCore.step` has returned, or raised `problem`."""

    begun: float
    at: float
    ended: Sequence[SequenceEnd]
    scheduled: "tuple[Scheduled | None, ...]"
    """The steps that it scheduled. None: the sequences of the step before, the next token of each."""
    problem: str = ""


class Live(NamedTuple):
    """A request that was unfinished when a generation began, and its live sequences."""

    request: EngineCoreRequest
    is_forked: bool
    sequences: list[tuple[int, int, int]]
    """(sequence id, tokens it has, tokens it may have)."""


Entry = Added | Called | Stepped


class Generation:
    """Some consecutive entries, and what was unfinished before them."""

    def __init__(self, live: list[Live], policy_version: int, *, is_first: bool) -> None:
        self.live, self.policy_version = live, policy_version
        self.is_first = is_first
        """Nothing came before it."""
        self.entries: list[Any] = []
        """Each an `Entry`, or the plain tuple of a `Stepped`, which is made at every step."""


class RecordedCore(EngineCore):
    """An `EngineCore` that remembers what was done to it, some hundred steps back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.generations = [Generation([], self.policy_version, is_first=True)]
        """The last two, oldest first."""
        self._rows: Any = None
        """The sequences of the last step, if it gave each of them a token."""
        self._begun = 0.0
        self._scheduled: tuple[Scheduled | None, ...] = ()
        """Schedules that the call of `step` in progress has made; None for one that repeats the last."""

    @property
    def config(self) -> CoreConfig:
        """Its sizes."""
        return self._config

    @property
    def unended(self) -> Stepped | None:
        """The call of `step` in progress, if it has scheduled anything."""
        return Stepped(self._begun, self._begun, (), self._scheduled) if self._scheduled else None

    def record(self, entry: Entry | tuple[Any, ...]) -> None:
        """Remember an entry."""
        entries = self.generations[-1].entries
        entries.append(entry)
        if len(entries) >= _NUM_ENTRIES:
            self._begin_generation()

    def record_verb(self, title: str) -> None:
        """Remember a call of a verb."""
        self.record(Called(time.monotonic(), title[:80], (), is_verb=True))

    def step(self) -> EngineCoreOutputs:
        self._begun = time.monotonic()
        try:
            outputs = EngineCore.step(self)
        except BaseException as error:
            scheduled, self._scheduled = self._scheduled, ()
            self.record(Stepped(self._begun, time.monotonic(), (), scheduled, error_text(error)))
            raise
        scheduled, self._scheduled = self._scheduled, ()
        self.record((self._begun, time.monotonic(), outputs.ended or (), scheduled))
        return outputs

    def _schedule(self) -> Step | None:
        step = EngineCore._schedule(self)
        if step is not None:
            rows = step.rows
            is_plain = rows == step.sampled
            again = is_plain and rows == self._rows
            self._scheduled += (None if again else _scheduled(step.work),)
            self._rows = rows if is_plain else None
        return step

    def _begin_generation(self) -> None:
        live = [
            Live(
                request.source,
                request.forked,
                [(each.sequence_id, each.num_tokens, each.max_num_tokens) for each in request.live_sequences],
            )
            for request in self._requests.by_id.values()
        ]
        self._rows = None
        self.generations = [self.generations[-1], Generation(live, self.policy_version, is_first=False)]

    def _called(self, name: str, *arguments: Any) -> None:
        self._rows = None
        self.record(Called(time.monotonic(), name, arguments))

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        self.record(Added(time.monotonic(), request))

    def abort_sequences(self, sequence_ids: Iterable[int]) -> EngineCoreOutputs:
        ids = list(sequence_ids)
        self._called("abort_sequences", ids)
        return super().abort_sequences(ids)

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> EngineCoreOutputs:
        self._called("pause", mode)
        return super().pause(mode, clear_cache=clear_cache)

    def resume(self) -> None:
        self._called("resume")
        super().resume()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> EngineCoreOutputs:
        self._called("sleep", level, mode)
        return super().sleep(level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self._called("wake_up", tags)
        super().wake_up(tags)

    def begin_update(self, verb: str = "update_weights") -> None:
        self._called("begin_update", verb)
        super().begin_update(verb)

    def close_for_update(self, mode: PauseMode) -> EngineCoreOutputs:
        self._called("close_for_update", mode)
        return super().close_for_update(mode)

    def commit_version(self, version: int, kv: str = "keep") -> int:
        self._called("commit_version", version, kv)
        return super().commit_version(version, kv)

    def end_update(self, *, dirty: bool | None) -> None:
        self._called("end_update", dirty)
        super().end_update(dirty=dirty)


def _scheduled(work: SchedulerOutput) -> Scheduled:
    rows = ((row.sequence_id, row.num_computed_tokens, row.num_scheduled_tokens) for row in work.scheduled)
    samples = array("q", [task.sequence_id for task in work.samples])
    return Scheduled(work.step, work.policy_version, array("q", chain.from_iterable(rows)), samples)
