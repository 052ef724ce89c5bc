"""The ledger of an evaluation: what was asked, and every sample once, on disk as soon as its group has ended.

A directory with

    sweep.json       what is evaluated: digests of tasks, settings, checkpoints and the engine
    samples.jsonl    one sample a line, a file of rollouts like any other (`rollout_engine.rollout_log`): `read_jsonl`,
                     `view` and `replay` take it. "evaluation" says whose sample it is: checkpoint, task and setting,
                     whether it is "correct", and the "answer" that it votes for. "group_id" is the prompt's number.

A line that a killed process left half written is cut off, and its sample is made again. Seeds depend on task, setting,
prompt and index alone, so a resumed evaluation has the samples of one that nothing disturbed.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rollout_engine.batches.jsonl import line_of
from rollout_engine.batches.rollout_files import read_jsonl
from rollout_engine.errors import RequestError

logger = logging.getLogger("rollout_engine")

SCHEMA = 1
"""Number of the tables above; a directory with a higher one is not read."""
SAMPLES = "samples.jsonl"
"""Name of the file of samples in the directory of an evaluation."""
_PLAN = "sweep.json"
_ENGINE_BITS = ("dtype", "fp32_head", "quantization", "deterministic", "logits_processors")
"""Settings of an engine that decide what is drawn."""


class Cell(NamedTuple):
    """One column of results: a task under a setting by a checkpoint."""

    checkpoint: str
    task: str
    setting: str

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> "Cell":
        """The cell of a sample."""
        return cls(*(sample["evaluation"][name] for name in cls._fields))


class Ledger:
    """The samples of an evaluation. Without a directory they are in memory alone."""

    def __init__(self, out: str | os.PathLike[str] | None, plan: dict[str, Any], *, resume: bool) -> None:
        """Begin, or go on with what the directory has. `plan`: what is evaluated, as sweep.json holds it.

        Raises `RequestError` where the directory holds another evaluation, or another process writes to it.
        """
        self.plan = {"schema": SCHEMA, **plan}
        self.samples: list[dict[str, Any]] = []
        self._known: dict[tuple[Cell, int], set[int]] = {}
        self._directory = None if out is None else Path(out)
        self._file: BinaryIO | None = None
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self._directory / SAMPLES, "a+b")
        except OSError as problem:
            raise _unusable(out, problem) from problem
        try:
            self._lock()
            if resume:
                self._resume()
            else:
                self._file.truncate(0)
            self.write_plan()
        except BaseException:
            self.close()
            raise

    def has(self, cell: Cell, prompt: int) -> set[int]:
        """Indexes of the samples of a prompt that are there."""
        return self._known.get((cell, prompt), set())

    def add(self, samples: Iterable[dict[str, Any]]) -> int:
        """Append the samples of one group that are not there yet. Returns how many were."""
        new = [
            sample for sample in samples if sample["sample_index"] not in self.has(Cell.of(sample), sample["group_id"])
        ]
        if self._file is not None:
            self._file.write("".join(line_of(sample) + "\n" for sample in new).encode())
            self._file.flush()
        for sample in new:
            self._count(sample)
        return len(new)

    def note_checkpoint(self, name: str, facts: dict[str, Any]) -> None:
        """Note a checkpoint's digest and version. Raises `RequestError` where it has other weights than before."""
        before = self.plan["checkpoints"].get(name, {})
        if before.get("digest", facts["digest"]) != facts["digest"]:
            hint = "Its weights were others when its first samples were made: give it another name, or another out=."
            raise RequestError.for_field(
                f"checkpoints[{name!r}]", facts["digest"], f"{before['digest']}, as before", hint
            )
        self.plan["checkpoints"][name] = before | facts
        self.write_plan()

    def write_plan(self) -> None:
        """Write sweep.json, whole or not at all."""
        if self._directory is not None:
            made = self._directory / f"{_PLAN}.new"
            made.write_text(json.dumps(self.plan, indent=1, ensure_ascii=False), encoding="utf-8")
            made.replace(self._directory / _PLAN)

    def close(self) -> None:
        """Let go of the file, so that another process may go on."""
        if self._file is not None:
            self._file.close()

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            hint = "Another evaluation is writing to it: wait for its end, or give another out=."
            raise RequestError.for_field("out", str(self._directory), "a directory of its own", hint) from problem

    def _resume(self) -> None:
        assert self._directory is not None and self._file is not None
        _cut_last_line(self._file, self._directory / SAMPLES)
        if not (self._directory / _PLAN).exists():
            if self._file.seek(0, os.SEEK_END):
                hint = f"It has {SAMPLES} and no {_PLAN}: is it another program's?"
                hint = f"{hint} resume=False (--no-resume) begins anew there."
                raise RequestError.for_field("out", str(self._directory), "an evaluation, or a new directory", hint)
            return
        before, samples = read_ledger(self._directory)
        _check_same(before, self.plan, str(self._directory))
        for name in ("tasks", "settings", "checkpoints"):
            self.plan[name] = before[name] | self.plan[name]
        for name, facts in before["checkpoints"].items():
            self.plan["checkpoints"][name] = facts
        for sample in samples:
            self._count(sample)

    def _count(self, sample: dict[str, Any]) -> None:
        self.samples.append(sample)
        self._known.setdefault((Cell.of(sample), sample["group_id"]), set()).add(sample["sample_index"])


def read_ledger(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(sweep.json, samples) of a directory; a half-written last line is left out, with a warning.

    Raises `RequestError` where it holds no evaluation, or a newer version wrote it.
    """
    path = Path(directory) / _PLAN
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        hint = f"{_PLAN}: {problem}."
        raise RequestError.for_field("out", str(directory), "the directory of an evaluation", hint) from problem
    schema = plan.get("schema") if isinstance(plan, dict) else None
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        hint = "A newer rollout-engine wrote it: read it with that one."
        raise RequestError.for_field(f"{path}: schema", schema, f"at most {SCHEMA}", hint)
    lines = read_jsonl(Path(directory) / SAMPLES) if (Path(directory) / SAMPLES).exists() else []
    samples, known = [], set()
    for sample in lines:
        if "evaluation" not in sample:
            raise RequestError(f"{directory}/{SAMPLES} has a rollout of no evaluation: group {sample['group_id']}.")
        if (which := (Cell.of(sample), sample["group_id"], sample["sample_index"])) not in known:
            known.add(which)
            samples.append(sample)
    return plan, samples


def _cut_last_line(file: BinaryIO, path: Path) -> None:
    """Cut off a last line that is not complete."""
    size = file.seek(0, os.SEEK_END)
    end = size
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
        if found >= 0:
            break
    if end < size:
        logger.warning(
            "%s: its last line was cut off (%d bytes) and is left out; its sample is made again", path, size - end
        )
        file.truncate(end)


def _check_same(before: dict[str, Any], plan: dict[str, Any], out: str) -> None:
    """Raise `RequestError` where what both have is not the same."""
    hint = "Give another out=, or resume=False (--no-resume) to begin anew there."
    if before["seed"] != plan["seed"]:
        raise RequestError.for_field("seed", plan["seed"], f"{before['seed']}, as in {out}", hint)
    for kind in ("tasks", "settings"):
        for name, facts in plan[kind].items():
            known = before[kind].get(name, facts)
            if known != facts:
                keys = sorted(key for key in {*known, *facts} if known.get(key) != facts.get(key))
                what = f"the one that {out} has results of; it differs in {', '.join(keys)}"
                raise RequestError.for_field(kind, name, what, hint)
    for name in _ENGINE_BITS:
        if (was := before["engine"].get(name)) != plan["engine"][name]:  # older ledgers have no quantization
            bound = f"{was!r}, which sampled what is in {out}"
            raise RequestError.for_field(name, plan["engine"][name], bound, hint)


def _unusable(out: object, problem: OSError) -> RequestError:
    return RequestError.for_field("out", str(out), "a directory that can be written to", f"{problem}.")
