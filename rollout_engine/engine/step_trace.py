"""A trace of an engine's steps on disk, of bounded size: the tokens each computed, and the sequences it sampled.

    header   format, process, and the sequences that the runner had when the file began
    step     a step: new and released sequences, rows, draws, the version, when and for how long

Tokens are not in it. A sequence is named by its seed, its prompt's length and a checksum of that. A trace is two files
at most, NAME.jsonl and before it NAME.1.jsonl, of half the bound each: when one is full it takes the other's place.
Both ends are in this file.
"""

import logging
import os
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollout_engine.base.errors import ConfigError, error_text, refused
from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.core.recorder import Recorder

logger = logging.getLogger("rollout_engine")

FORMAT = 1
_NUMBERS = count()


class TracedSequence(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that the runner has."""

    id: int
    seed: int
    """Its own seed, in [0, 2**64)."""
    num_prompt_tokens: int
    checksum: int
    """`prompt_checksum` of the prompt."""


class Row(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one sequence that a step computed, from `start` on."""

    id: int
    start: int
    num_tokens: int
    """Drafts included."""
    num_drafts: int = 0


class TraceHeader(msgspec.Struct, tag="header", kw_only=True):
    """The first line of a file."""

    format: int
    pid: int
    time: float
    """Seconds since 1970."""
    model: str
    live: list[TracedSequence]
    """Sequences that the runner has before the first step of this file."""


class TracedStep(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """One step."""

    step: int
    version: int
    at: float
    """When it was submitted, seconds since 1970."""
    seconds: float
    """Until its result was there."""
    released: list[int] = []
    """Sequences that the runner forgot before it: they had ended, or had lost their KV."""
    new: list[TracedSequence] = []
    rows: list[Row] | None = None
    """None: as in the step before, the next token of each."""
    samples: list[tuple[int, int]] = []
    """(sequence, row from which its token was drawn); left out with `rows`: one of each row."""
    drawn: list[int] = []
    """Tokens that each sample drew, after drafts that were right; empty: one each."""
    problem: str = ""
    """The error that it raised; it drew nothing then."""


Line = TraceHeader | TracedStep
_DECODER = msgspec.json.Decoder(Line)


def prompt_checksum(token_ids: Sequence[int]) -> int:
    """A checksum of 32 bits, which distinguishes prompts of the same seed."""
    return zlib.crc32(array("q", token_ids).tobytes())


class StepTrace(Recorder):
    """Writes the steps of a core into the files of one engine. If they cannot be written it stops, with a warning."""

    def __init__(self, directory: str, max_bytes: int, model: str) -> None:
        """Create the directory if it is missing. Raises `ConfigError` if it cannot be written to."""
        name = f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_NUMBERS)}"
        self.path = Path(directory) / f"{name}.jsonl"
        self._before = self.path.with_name(f"{name}.1.jsonl")
        self._max_bytes, self._model = max_bytes // 2, model
        self._live: dict[int, TracedSequence] = {}
        self._rows: list[Row] = []
        """Those of the last step, if each drew one token."""
        self._num_bytes = 0
        self._is_open = True
        self._submitted: deque[tuple[TracedStep, float]] = deque()
        """Steps without a result, and when each was submitted (`time.perf_counter`)."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._append(self._header())
        except (OSError, ValueError) as problem:  # a name with a zero byte is a ValueError
            raise ConfigError(refused("step_trace", directory, "a directory to write to", f"{problem}.")) from None

    def record_schedule(self, work: SchedulerOutput, rows: object, sampled: object) -> None:
        self._submitted.append((_step_of(work), time.perf_counter()))

    def record_result(self, result: ModelRunnerOutput | None, problem: BaseException | None) -> None:
        step, start = self._submitted.popleft()
        step.seconds = time.perf_counter() - start
        if result is not None:
            step.drawn = list(result.num_drawn or ())
        else:
            step.problem = error_text(problem)[:200] if problem is not None else ""
            self._submitted.clear()
        self.write(step)

    def write(self, step: TracedStep) -> None:
        """Append a step."""
        if not self._is_open:
            return
        try:
            if self._num_bytes > self._max_bytes:
                self._begin_file()
            rows = step.rows or []
            is_plain = not step.drawn and not step.problem and step.samples == [(r.id, i) for i, r in enumerate(rows)]
            if rows and is_plain and rows == [Row(row.id, row.start + 1, 1) for row in self._rows] and not step.new:
                step.rows, step.samples = None, []
            self._rows = rows if is_plain and all(row.num_tokens == 1 for row in rows) else []
            self._append(step)
        except OSError as problem:
            self._is_open = False
            logger.warning("The trace of steps ends, %s cannot be written: %s.", self.path, problem)
        for sequence_id in step.released:
            self._live.pop(sequence_id, None)
        self._live.update((sequence.id, sequence) for sequence in step.new)

    def _begin_file(self) -> None:
        os.replace(self.path, self._before)
        self._num_bytes, self._rows = 0, []
        self._append(self._header())

    def _header(self) -> TraceHeader:
        return TraceHeader(
            format=FORMAT, pid=os.getpid(), time=time.time(), model=self._model, live=list(self._live.values())
        )

    def _append(self, line: Line) -> None:
        content = msgspec.json.encode(line) + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(content)
        self._num_bytes += len(content)


def _step_of(work: SchedulerOutput) -> TracedStep:
    return TracedStep(
        step=work.step,
        version=work.policy_version,
        at=time.time(),
        seconds=0.0,
        released=list(work.finished_sequence_ids),
        new=[
            TracedSequence(
                each.sequence_id,
                each.seed % 2**64,
                each.num_prompt_tokens,
                prompt_checksum(each.token_ids[: each.num_prompt_tokens]),
            )
            for each in work.new
        ],
        rows=[
            Row(row.sequence_id, row.num_computed_tokens, row.num_scheduled_tokens, len(row.draft_token_ids))
            for row in work.scheduled
        ],
        samples=[(task.sequence_id, task.row) for task in work.samples],
    )


class Trace(NamedTuple):
    """The steps that the files of one engine hold."""

    name: str
    live: list[TracedSequence]
    """Sequences that the runner had before the first step."""
    steps: list[TracedStep]
    """Oldest first, with `rows` and `samples` filled in."""


def read_traces(directory: str | os.PathLike[str]) -> Iterator[Trace]:
    """The traces in a directory, oldest first. Lines that were cut off, and files of another format, are left out."""
    for path in sorted(Path(directory).glob("trace-*.jsonl")):
        if not path.stem.endswith(".1"):
            files = (path.with_name(f"{path.stem}.1.jsonl"), path)
            lines = [line for file in files if file.exists() for line in _lines(file)]
            headers = [line for line in lines if isinstance(line, TraceHeader)]
            if headers and all(header.format == FORMAT for header in headers):
                steps = [line for line in lines if isinstance(line, TracedStep)]
                _fill_in(steps)
                yield Trace(path.stem, headers[0].live, steps)


def _fill_in(steps: list[TracedStep]) -> None:
    """Write out the rows of steps that are as the ones before."""
    before: list[Row] = []
    for step in steps:
        if step.rows is None:
            step.rows = [Row(row.id, row.start + 1, 1) for row in before]
            step.samples = [(row.id, i) for i, row in enumerate(before)]
        before = step.rows


def _lines(path: Path) -> Iterator[Line]:
    with open(path, "rb") as file:
        for line in file:
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError:  # cut off, or another format
                continue
