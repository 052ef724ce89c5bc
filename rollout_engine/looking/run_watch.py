"""The state of a run, from its directory: files of rollouts, and files of steps if the trainer writes them."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.rollout_files import parse_sample
from rollout_engine.looking.followed_file import FollowedFile
from rollout_engine.looking.steps_file import NAME, LoggedStep, read_step

_MOST_STEPS = 1_000
_WINDOW = 32
"""Samples whose means replace those of a step if no steps are logged."""
_FIRST = (
    "reward/mean",
    "reward/std",
    "length/mean",
    "length/max",
    "entropy",
    "kl",
    "staleness/mean",
    "staleness/max",
    "tokens_per_second",
    "engine/stall_seconds",
    "loss",
)
"""Names that are shown first, in this order; others follow by their name."""


class WatchedSample(NamedTuple):
    """The numbers that are kept of a sample."""

    where: str
    reward: float | None
    is_counted: bool
    """Whether its reward counts: not that of an episode that failed, or that an earlier row has."""
    turns: tuple[int, int]
    """First and last turn of the row in its episode; (-1, -1) of other samples."""
    num_tokens: int
    """Number of sampled tokens."""
    mean_log_prob: float
    age: int | None
    """Versions between its oldest token and the newest one of its file so far; None without a token."""
    newest: int
    """Newest version that sampled it; -1 without a token."""
    text: str
    """Beginning of its response."""


class RunWatch:
    """Follows the files below a directory: `rollouts*.jsonl` and `steps.jsonl`, at any depth."""

    def __init__(self, directory: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `RequestError` if there is no such directory."""
        self.directory = Path(directory)
        if not self.directory.is_dir():
            hint = "Give the one that rollout(log_to=...) or StepLog writes into."
            raise RequestError.for_field("DIR", str(directory), "a directory", hint)
        self._clock = clock
        self._files: dict[Path, FollowedFile] = {}
        self.steps: deque[LoggedStep] = deque(maxlen=_MOST_STEPS)
        self.samples: deque[WatchedSample] = deque(maxlen=_WINDOW)
        """The newest samples."""
        self.num_samples = self.num_tokens = self.num_bad_lines = 0
        self._windows: deque[LoggedStep] = deque(maxlen=_MOST_STEPS)
        self._newest_versions: dict[Path, int] = {}
        """Newest version among the samples of each file so far."""
        self._reads: deque[tuple[float, int]] = deque(maxlen=64)
        """(time, tokens read by then) of the latest calls of `read`."""

    def read(self) -> bool:
        """Read new lines. Returns whether there were any."""
        num_lines, was_behind = 0, self.is_behind
        for path in self._find_files():
            file = self._files.setdefault(path, FollowedFile(path))
            for line in file.read():
                num_lines += 1
                if path.name == NAME:
                    self._add_step(line)
                else:
                    self._add_sample(path, line)
        if was_behind or self.is_behind:
            self._reads.clear()  # old lines do not count as arriving now
        self._reads.append((self._clock(), self.num_tokens))
        return num_lines > 0

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled tokens that were added to the files a second, over the latest calls of `read`; None at first."""
        if len(self._reads) < 2:
            return None
        (start, before), (end, now) = self._reads[0], self._reads[-1]
        return (now - before) / max(end - start, 1e-9)

    @property
    def is_behind(self) -> bool:
        """Whether the last call of `read` has left more to read."""
        return any(file.is_behind for file in self._files.values())

    @property
    def is_estimated(self) -> bool:
        """Whether no steps are logged, so that `series` is made from every 32 samples."""
        return not self.steps

    def series(self) -> dict[str, list[float | None]]:
        """Name of each statistic -> its values, oldest first; None for one that was not finite."""
        steps = list(self.steps or self._windows)
        names = dict.fromkeys(name for step in steps for name in step.numbers)
        known = [name for name in _FIRST if name in names]
        ordered = known + sorted(name for name in names if name not in known)
        return {name: [step.numbers[name] for step in steps if name in step.numbers] for name in ordered}

    @property
    def last_step(self) -> int | None:
        """Number of the newest step; None without any."""
        return self.steps[-1].step if self.steps else None

    def _find_files(self) -> list[Path]:
        patterns = (NAME, "rollouts*.jsonl")
        return sorted(path for pattern in patterns for path in self.directory.rglob(pattern))

    def _add_step(self, line: bytes) -> None:
        step = read_step(line)
        if step is None:
            self.num_bad_lines += 1
        else:
            self.steps.append(step)

    def _add_sample(self, path: Path, line: bytes) -> None:
        sample = parse_sample(line)
        try:
            last = self.samples[-1] if self.samples else None
            watched = None if sample is None else _watch_sample(sample, last, self._newest_versions.get(path, -1))
        except (TypeError, ValueError, OverflowError):  # lists of something else than numbers
            watched = None
        if watched is None:
            self.num_bad_lines += 1
            return
        self.num_samples += 1
        self.num_tokens += watched.num_tokens
        self._newest_versions[path] = max(self._newest_versions.get(path, -1), watched.newest)
        self.samples.append(watched)
        if self.num_samples % _WINDOW == 0:
            numbers: dict[str, float | None] = dict(_means(list(self.samples)))
            self._windows.append(LoggedStep(self.num_samples // _WINDOW - 1, 0.0, numbers))


def _watch_sample(sample: dict[str, Any], last: WatchedSample | None, newest_version: int) -> WatchedSample:
    """The numbers of a sample; `last`: the one before it, `newest_version`: the newest version before it."""
    where = f"group {sample['group_id']}, sample {sample['sample_index']}"
    turns = [turn for turn in sample.get("turns") or () if turn >= 0] or [-1]
    is_same_episode = last is not None and last.where == where and -1 < last.turns[1] < min(turns)
    versions = [version for version in sample["policy_version"] if version >= 0]
    pairs = zip(sample["log_probs"], sample["policy_version"], strict=False)
    drawn = [logprob for logprob, version in pairs if version >= 0]
    response = sample.get("response")
    return WatchedSample(
        where=where,
        reward=None if sample.get("reward") is None else float(sample["reward"]),
        is_counted=sample.get("error") is None and not is_same_episode,
        turns=(min(turns), max(turns)),
        num_tokens=len(versions),
        mean_log_prob=math.fsum(drawn) / len(drawn) if drawn else 0.0,
        age=max([newest_version, *versions]) - min(versions) if versions else None,
        newest=max(versions, default=-1),
        text=response[:400] if isinstance(response, str) else f"{len(sample['response_token_ids'])} tokens",
    )


def _means(samples: list[WatchedSample]) -> Iterator[tuple[str, float]]:
    rewards = [sample.reward for sample in samples if sample.reward is not None and sample.is_counted]
    if rewards:
        yield "reward/mean", math.fsum(rewards) / len(rewards)
    num_tokens = sum(sample.num_tokens for sample in samples)
    yield "length/mean", num_tokens / len(samples)
    yield "length/max", float(max(sample.num_tokens for sample in samples))
    if num_tokens:
        yield "entropy", -math.fsum(sample.mean_log_prob * sample.num_tokens for sample in samples) / num_tokens
    if ages := [sample.age for sample in samples if sample.age is not None]:
        yield "staleness/max", float(max(ages))
