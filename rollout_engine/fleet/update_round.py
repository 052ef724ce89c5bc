"""The parts of one update of a fleet: with all of its replicas at once, and with those that fail."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import msgspec

from rollout_engine.base.errors import DirtyWeightsError, TransferTimeoutError, WeightUpdateError
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import run_together
from rollout_engine.fleet.member import Member
from sync.base import WeightSource
from sync.errors import ManifestMismatch
from sync.source import SourcePair, read_source, tied_groups

R = TypeVar("R")


@contextmanager
def held(members: Mapping[int, Member], seconds: float, errors: dict[int, Exception]) -> Iterator[dict[int, Member]]:
    """Keep others from changing the weights of members; adds to `errors` where somebody still does after `seconds`."""
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        free = {}
        for index, member in members.items():
            if member.updating.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                stack.callback(member.updating.release)
                free[index] = member
            else:
                errors[index] = TransferTimeoutError(f"Replica {index} was still catching up after {seconds:g} s.")
        yield free


def drop(
    members: Mapping[int, Member],
    staged: Mapping[int, tuple[int, str]],
    reports: dict[int, UpdateReport],
    errors: dict[int, Exception],
) -> list[int]:
    """Have members drop what they have staged. One that turns out to have committed it gets a report.

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


def at_all(
    members: Mapping[int, Member], work: Callable[[Member], R], results: dict[int, R], errors: dict[int, Exception]
) -> None:
    """Work with all members at once; adds to `results` and `errors`, also where this thread is interrupted."""

    def work_with(index: int) -> None:
        try:
            results[index] = work(members[index])
        except Exception as problem:
            errors[index] = problem

    run_together([partial(work_with, index) for index in members], name="update-replica")


def check_same(path: str, staged: Mapping[int, tuple[int, str]]) -> None:
    """Raise `WeightUpdateError` where replicas have staged different weights."""
    if len(set(staged.values())) > 1:
        read = [f"replica {index}: version {version}, {digest}" for index, (version, digest) in staged.items()]
        what = f"update_weights: the replicas have read different weights at {path} ({', '.join(read)})"
        raise WeightUpdateError(f"{what}; nothing is changed. Let nobody write there meanwhile, and update again.")


def overlaid(store: str, part: WeightSource) -> list[SourcePair]:
    """All tensors of a store, in files; those of `part` replace theirs, and what is tied to them.

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
