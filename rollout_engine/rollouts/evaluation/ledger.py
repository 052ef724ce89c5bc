"""The ledger of an evaluation: its plan, and every sample once, on disk as soon as its group has ended.

A directory with

    sweep.json       the plan: digests of tasks, settings, checkpoints and the engine
    samples.jsonl    one sample a line, a file of rollouts like any other (`rollout_engine.rollouts.log`): `read_jsonl`,
                     `view` and `replay` take it. "evaluation" has the sample's checkpoint, task and setting,
                     whether it is "correct", the "answer" that it votes for, and its "num_tokens". "group_id" is the
                     prompt's number.
    pictures/        of prompts and environments, if there are any (`rollout_engine.batches.picture_files`)

Of an episode of several rows the line is that of the last one. A line that a killed process left half written is cut
off, and its sample is made again; so is an episode that failed, whose new line then counts. Seeds depend on task,
setting, prompt and index alone, so a resumed evaluation has the samples of an uninterrupted one.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.jsonl import line_of
from rollout_engine.batches.picture_files import FOLDER, save_pictures
from rollout_engine.batches.rollout_files import read_jsonl

logger = logging.getLogger("rollout_engine")

SCHEMA = 1
"""Number of the tables above; a directory with a higher one is not read."""
SAMPLES = "samples.jsonl"
"""Name of the file of samples in the directory of an evaluation."""
_PLAN = "sweep.json"
_ENGINE_BITS = ("dtype", "fp32_head", "quantization", "deterministic", "logits_processors")
"""Settings of an engine that determine the samples."""
_FAILED = {"error": "not made yet"}


class Cell(NamedTuple):
    """One column of results: a task under a setting by a checkpoint."""

    checkpoint: str
    task: str
    setting: str

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> "Cell":
        """The cell of a sample."""
        return cls(*(sample["evaluation"][name] for name in cls._fields))


def key_of(sample: Mapping[str, Any]) -> tuple[Cell, int, int]:
    """Cell, prompt and index of a sample."""
    return Cell.of(sample), sample["group_id"], sample["sample_index"]


def has_failed(sample: Mapping[str, Any]) -> bool:
    """Whether it is an episode that failed."""
    return sample.get("error") is not None


def num_sampled(line: Mapping[str, Any]) -> int:
    """Sampled tokens of a line; of an episode, if an evaluation has noted them, in all its rows."""
    versions = line["policy_version"]
    return line.get("evaluation", {}).get("num_tokens", len(versions) - versions.count(-1))  # type: ignore[no-any-return]


class Ledger:
    """The samples of an evaluation. Without a directory they are in memory alone."""

    def __init__(self, out: str | os.PathLike[str] | None, plan: dict[str, Any], *, resume: bool) -> None:
        """Begin, or continue from the samples in the directory. `plan`: the content of sweep.json.

        Raises `RequestError` if the directory holds another evaluation, or another process writes to it.
        """
        self.plan = {"schema": SCHEMA, **plan}
        self._samples: dict[tuple[Cell, int, int], dict[str, Any]] = {}
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

    @property
    def samples(self) -> list[dict[str, Any]]:
        """All samples, each once."""
        return list(self._samples.values())

    def has(self, cell: Cell, prompt: int, index: int) -> bool:
        """Whether a sample of a prompt is there and has not failed."""
        return not has_failed(self._samples.get((cell, prompt, index), _FAILED))

    def has_any(self, cell: Cell) -> bool:
        """Whether there is a sample of the cell that has not failed."""
        return any(key[0] == cell and not has_failed(sample) for key, sample in self._samples.items())

    def add(self, samples: Iterable[dict[str, Any]]) -> int:
        """Append the samples of one group that are not there yet, or failed. Returns how many were."""
        new = {key: sample for sample in samples if not self.has(*(key := key_of(sample)))}
        if self._file is not None and self._directory is not None:
            save_pictures(self._directory / FOLDER, new.values())
            self._file.write("".join(line_of(sample) + "\n" for sample in new.values()).encode())
            self._file.flush()
        self._samples |= new
        return len(new)

    def note_checkpoint(self, name: str, facts: dict[str, Any]) -> None:
        """Note a checkpoint's digest and version. Raises `RequestError` if it has other weights than before."""
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
        """Release the file, so that another process may continue."""
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
        self._samples = {key_of(sample): sample for sample in samples}


def read_ledger(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(sweep.json, samples) of a directory; a half-written last line is left out, with a warning.

    Raises `RequestError` if it holds no evaluation, or a newer version wrote it.
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
    samples: dict[tuple[Cell, int, int], dict[str, Any]] = {}
    for sample in lines:
        if "evaluation" not in sample:
            raise RequestError(f"{directory}/{SAMPLES} has a rollout of no evaluation: group {sample['group_id']}.")
        if has_failed(samples.get(key := key_of(sample), _FAILED)):
            samples[key] = sample
    return plan, list(samples.values())


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
    """Raise `RequestError` if an entry that both have differs."""
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
