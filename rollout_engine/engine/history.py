"""The last steps and calls of a core, kept by reference: a core that dies writes them to a file."""

import time
from array import array
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import error_text
from rollout_engine.base.messages import EngineCoreRequest, SchedulerOutput, SequenceEnd
from rollout_engine.base.picture_cache import without_arrays
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.recorder import Recorder
from rollout_engine.core.request import Sequence

_NUM_ENTRIES = 1024
"""Entries after which a generation of the history ends. The last two generations are kept."""


class Added(NamedTuple):
    """A request was added."""

    at: float
    """`time.monotonic`, as everywhere here."""
    request: EngineCoreRequest


class Called(NamedTuple):
    """A method of the core was called, or a verb of the engine (`is_verb`)."""

    at: float
    name: str
    arguments: tuple[Any, ...]
    is_verb: bool = False
    options: Mapping[str, Any] = {}


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
    ended: Collection[SequenceEnd]
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
    """Some consecutive entries, and the requests that were unfinished before them."""

    def __init__(self, live: list[Live], policy_version: int, *, is_first: bool) -> None:
        self.live, self.policy_version = live, policy_version
        self.is_first = is_first
        """Whether the history begins with it."""
        self.entries: list[Any] = []
        """Each an `Entry`, or the plain tuple of a `Stepped`, which is made at every step."""


class History(Recorder):
    """A recorder that keeps the steps and calls of a core, some hundred steps back."""

    def __init__(self, core: EngineCore) -> None:
        """Record `core` from now on."""
        self._core = core
        self.generations = [Generation([], core.policy_version, is_first=True)]
        """The last two, oldest first."""
        self._rows: list[Sequence] | None = None
        """The sequences of the last step, if it gave each of them a token."""
        self._begun = 0.0
        self._scheduled: tuple[Scheduled | None, ...] = ()
        """Steps that the call of `step` in progress has submitted; None for one that repeats the last."""
        core.recorders.append(self)

    @property
    def config(self) -> CoreConfig:
        """Sizes of the core."""
        return self._core.config

    @property
    def unended(self) -> Stepped | None:
        """The call of `step` in progress, if it has submitted anything."""
        return Stepped(self._begun, self._begun, (), self._scheduled) if self._scheduled else None

    def record_verb(self, title: str) -> None:
        """Remember a call of a verb."""
        self._append(Called(time.monotonic(), title[:80], (), is_verb=True))

    def record_call(self, name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._rows = None
        if len(self.generations[-1].entries) >= _NUM_ENTRIES:  # while the core is as before the call
            self._begin_generation()
        self.generations[-1].entries.append(Called(time.monotonic(), name, arguments, options=options))

    def record_request(self, request: EngineCoreRequest) -> None:
        self._append(Added(time.monotonic(), _recordable(request)))

    def begin_step(self) -> None:
        self._begun = time.monotonic()

    def record_schedule(self, work: SchedulerOutput, rows: list[Sequence], sampled: list[Sequence]) -> None:
        is_plain = rows == sampled
        again = is_plain and rows == self._rows
        self._scheduled += (None if again else _record_scheduled(work),)
        self._rows = rows if is_plain else None

    def end_step(self, ended: Collection[SequenceEnd], problem: BaseException | None) -> None:
        scheduled, self._scheduled = self._scheduled, ()
        error = "" if problem is None else error_text(problem)
        self._append((self._begun, time.monotonic(), ended, scheduled, error))

    def _append(self, entry: Entry | tuple[Any, ...]) -> None:
        entries = self.generations[-1].entries
        entries.append(entry)
        if len(entries) >= _NUM_ENTRIES:
            self._begin_generation()

    def _begin_generation(self) -> None:
        live = [
            Live(
                _recordable(request.source),
                request.forked,
                [(each.sequence_id, each.num_tokens, each.max_num_tokens) for each in request.live_sequences],
            )
            for request in self._core.unfinished_requests
        ]
        self._rows = None
        self.generations = [self.generations[-1], Generation(live, self._core.policy_version, is_first=False)]


def _recordable(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request without the arrays of its pictures, which would outlive it."""
    if not request.pictures:
        return request
    return msgspec.structs.replace(request, pictures=without_arrays(request.pictures))


def _record_scheduled(work: SchedulerOutput) -> Scheduled:
    rows = ((row.sequence_id, row.num_computed_tokens, row.num_scheduled_tokens) for row in work.scheduled)
    samples = array("q", [task.sequence_id for task in work.samples])
    return Scheduled(work.step, work.policy_version, array("q", chain.from_iterable(rows)), samples)
