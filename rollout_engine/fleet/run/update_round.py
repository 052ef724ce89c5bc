"""The carrier of changes to all replicas of a fleet: weights, a draft model's weights, adapters.

begin_round ── stage: every replica, while steps run ── commit: those that have staged it, between two steps
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from rollout_engine.base.errors import (
    DirtyWeightsError,
    EngineDeadError,
    RetryableError,
    TransferTimeoutError,
    WeightUpdateError,
)
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import run_together
from rollout_engine.fleet.run.member import Member
from sync.base import WeightSource
from sync.errors import ManifestMismatch
from sync.source import SourcePair, read_source, tied_groups

logger = logging.getLogger("rollout_engine")

S = TypeVar("S")
C = TypeVar("C")
R = TypeVar("R")


class Round(Generic[S, C]):
    """One change at the replicas of a fleet: staged by each of `members`, then committed by those that it names."""

    def __init__(self, verb: str) -> None:
        """`verb`: the user's method, which errors name."""
        self.verb = verb
        self.members: dict[int, Member] = {}
        """The replicas that take part."""
        self.staged: dict[int, S] = {}
        self.committed: dict[int, C] = {}
        self.errors: dict[int, Exception] = {}
        """Errors of replicas that have missed the change, also of those that take no part."""

    def stage(self, work: Callable[[Member], S]) -> None:
        """Have all members stage the change at once; fills `staged` and `errors`, even if interrupted."""
        self._at_all(self.members, work, self.staged)

    def commit(self, indexes: Iterable[int], work: Callable[[Member], C]) -> None:
        """Have these members commit the change at once; fills `committed` and `errors`."""
        self._at_all(indexes, work, self.committed)

    def failure(self, kind: str, is_over: Callable[[], bool] = lambda: False) -> Exception:
        """The error of a change that no replica has made. `kind`: "weights" or "adapters"; `is_over` is the fleet's."""
        error = next(iter(self.errors.values()))
        if not isinstance(error, EngineDeadError) or is_over():
            return error
        what = f"{self.verb}: every replica was lost before it had answered"
        return RetryableError(f"{what}; they are started again with the {kind} from before: call it again.")

    def log_missed(self, change: str) -> None:
        """Warn of the replicas that have missed the change, which others have made."""
        for index, error in self.errors.items():
            logger.warning("replica %d has missed %s: %s", index, change, error)

    def _at_all(self, indexes: Iterable[int], work: Callable[[Member], R], results: dict[int, R]) -> None:
        def work_with(index: int) -> None:
            try:
                results[index] = work(self.members[index])
            except Exception as problem:
                self.errors[index] = problem

        run_together([partial(work_with, index) for index in indexes], name="update-replica")


@contextmanager
def begin_round(verb: str, members: Mapping[int, Member], seconds: float) -> Iterator[Round[Any, Any]]:
    """Begin a change, and keep others from changing these members meanwhile.

    Those that are still being changed after `seconds` take no part. Raises `RetryableError` if there is no member, and
    `TransferTimeoutError` if none takes part.
    """
    if not members:
        what = f"{verb}: no replica of the fleet lives at the moment"
        raise RetryableError(f"{what}; they are started again: call it again a little later.")
    deadline, change = time.monotonic() + seconds, Round[Any, Any](verb)
    with ExitStack() as stack:
        for index, member in members.items():
            if member.updating.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                stack.callback(member.updating.release)
                change.members[index] = member
            else:
                problem = TransferTimeoutError(f"Replica {index} was still catching up after {seconds:g} s.")
                change.errors[index] = problem
        if not change.members:
            raise next(iter(change.errors.values()))
        yield change


def drop(
    members: Mapping[int, Member],
    staged: Mapping[int, tuple[int, str]],
    reports: dict[int, UpdateReport],
    errors: dict[int, Exception],
) -> list[int]:
    """Have members drop the weights that they have staged. One that turns out to have committed them gets a report.

    Returns those whose weights may be the old ones, the new ones, or a mixture.
    """
    in_doubt = [index for index in members if isinstance(errors.get(index), DirtyWeightsError)]
    for index, member in members.items():
        try:
            report = member.client.drop_staged_weights()
        except TransferTimeoutError as problem:
            errors[index] = problem
            in_doubt.append(index)
        else:
            if report is not None and staged.get(index) == (report.version, report.digest):
                reports[index] = report
                errors.pop(index, None)
    return in_doubt


def check_same(path: str, staged: Mapping[int, tuple[int, str]]) -> None:
    """Raise `WeightUpdateError` if replicas have staged different weights."""
    if len(set(staged.values())) > 1:
        read = [f"replica {index}: version {version}, {digest}" for index, (version, digest) in staged.items()]
        what = f"update_weights: the replicas have read different weights at {path} ({', '.join(read)})"
        raise WeightUpdateError(f"{what}; nothing is changed. Let nobody write there meanwhile, and update again.")


def overlaid(store: str, part: WeightSource) -> list[SourcePair]:
    """All tensors of a store, in files; those of `part` replace theirs, and the tensors tied to them.

    Raises `ManifestMismatch` for a part that is empty, or no tensors.
    """
    pairs, stored = read_source(part), read_source(store)
    if not pairs:
        raise ManifestMismatch("partial=True, and the update has no tensor: send at least one.")
    replaced = {name for name, _ in pairs}
    for group in tied_groups(stored):
        replaced |= set(group) if replaced.intersection(group) else set()
    return [*(pair for pair in stored if pair[0] not in replaced), *pairs]


def whole_report(reports: Mapping[int, UpdateReport]) -> UpdateReport:
    """The report of all replicas: the longest times, all requests, and each replica's own report."""
    return msgspec.structs.replace(
        next(iter(reports.values())),
        seconds=max(report.seconds for report in reports.values()),
        stall_seconds=max(report.stall_seconds for report in reports.values()),
        pack_seconds=max(report.pack_seconds for report in reports.values()),
        num_in_flight=sum(report.num_in_flight for report in reports.values()),
        replicas=dict(sorted(reports.items())),
    )
