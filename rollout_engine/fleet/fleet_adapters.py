"""LoRA adapters of a fleet: every replica that serves has the same ones, with the same values.

add_lora ── every replica: read, check ── the fleet decides: ── every replica: have exactly these adapters, between
            steps go on                   who gives way         two steps; who fails has missed it, and catches up

The fleet keeps the values, for replicas that start later or have missed a change.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import (
    EngineDeadError,
    LifecycleError,
    RequestError,
    RetryableError,
    TransferTimeoutError,
)
from rollout_engine.base.lora_request import LoRAInfo, LoRARequest
from rollout_engine.base.messages import KvMode
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import start_thread
from rollout_engine.core.adapters import Adapter, AdapterTable
from rollout_engine.engine.adapters import next_version
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.verbs import VERBS
from rollout_engine.fleet.brain import Brain
from rollout_engine.fleet.member import Member
from rollout_engine.fleet.update_round import at_all, held, whole_report
from rollout_engine.model.adapters.peft_format import copied

logger = logging.getLogger("rollout_engine")

ADAPTER_VERBS = ("add_lora", "ensure_lora", "list_loras", "pin_lora", "remove_lora", "update_lora")
_LOOK_SECONDS = 0.05
"""How often a change that waits for its turn looks whether somebody still awaits it."""
_CATCH_UP_SECONDS = 30.0
"""How long a change waits for a replica that is catching up; then that one has missed it."""


class AdapterState(NamedTuple):
    """All that a replica needs to have the fleet's adapters."""

    loras: list[LoRAInfo]
    values: dict[str, LoRARequest]
    """By the digest of an adapter."""
    policy_version: int
    num_changes: int


class FleetAdapters:
    """The adapters of a fleet, and their changes, one at a time. The fleet's lock guards it, `brain` and `members`."""

    def __init__(
        self,
        max_loras: int,
        brain: Brain,
        members: Mapping[int, Member],
        lock: "threading.RLock",
        is_over: Callable[[], bool],
        ended: Callable[[Mapping[int, Member], Mapping[int, UpdateReport], Iterable[int]], None],
    ) -> None:
        """`is_over`: whether the fleet itself is gone. `ended` is called, inside the lock, with the members of a change
        and as that of `FleetUpdates.push`."""
        self._brain, self._members, self._lock = brain, members, lock
        self._is_over, self._ended = is_over, ended
        self._table = AdapterTable(max_loras)
        self._values: dict[str, LoRARequest] = {}
        """By the digest of an adapter; nobody else changes them."""
        self._num_changes = 0
        """Changes that a replica has committed."""
        self._changing = threading.Lock()

    @property
    def is_changing(self) -> bool:
        """Whether a change is under way."""
        return self._changing.locked()

    @property
    def state(self) -> AdapterState:
        """The adapters as they are. Call it inside the lock."""
        return AdapterState(self._table.list(), self._values, self._brain.policy_version, self._num_changes)

    @contextmanager
    def unchanged(self, seconds: float) -> Iterator[None]:
        """Hold off changes. Raises `TransferTimeoutError` where one is still under way after `seconds`."""
        if not self._changing.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            what = f"update_weights: adapters were still being changed after {seconds:g} s"
            raise TransferTimeoutError(f"{what}; nothing is changed: update again.")
        try:
            yield
        finally:
            self._changing.release()

    def use(self, name: str) -> None:
        """Note that a new request names an adapter. Raises `RequestError` for one that the fleet has not."""
        self._table.use(name)

    def lags(self, member: Member) -> bool:
        """Whether a replica has missed a change."""
        return member.num_adapter_changes < self._num_changes

    def restore(self, member: Member, state: AdapterState) -> None:
        """Give a replica, whose `updating` is held, the adapters and the version of `state`."""
        for info in state.loras:
            stage = {"lora_request": state.values[info.digest], "verb": "add_lora"}
            member.client.call("stage_lora", stage).result()
        commit = {"loras": state.loras, "version": state.policy_version, "kv": "keep", "verb": "add_lora"}
        member.client.call("commit_loras", commit).result()
        member.num_adapter_changes = state.num_changes

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call one of `ADAPTER_VERBS` on the fleet. A change goes on to its end once it has begun."""
        checked, future = VERBS[name].check(arguments), CallFuture()
        checked.pop("timeout")  # the caller takes the call back then
        if name == "list_loras":
            with self._lock:
                future.succeed(self._table.list())
            return future
        if name == "ensure_lora" and (known := self._known(checked["lora_request"])) is not None:
            future.succeed(known)
            return future
        changes: dict[str, Callable[..., Any]] = {
            "add_lora": self._add,
            "ensure_lora": self._add,
            "pin_lora": self._pin,
            "remove_lora": self._remove,
            "update_lora": self._update,
        }
        start_thread(self._carry_out, future, partial(changes[name], **checked), name=name)
        return future

    def _carry_out(self, future: CallFuture, change: Callable[[], Any]) -> None:
        while not self._changing.acquire(timeout=_LOOK_SECONDS):
            if future.cancelled():
                return
        try:
            if future.begin():
                future.succeed(change())
        except BaseException as error:  # this thread's last
            future.fail(error)
        finally:
            self._changing.release()

    def _known(self, request: LoRARequest) -> LoRAInfo | None:
        """The adapter of a request, if it is there in this revision or a later one. Raises `RequestError`."""
        with self._lock:
            if not request.has_values:
                return self._table.get(request.name).info
            known = self._table.find(request.name)
            return known.info if known is not None and known.info.revision >= request.revision else None

    def _add(self, lora_request: LoRARequest) -> LoRAInfo:
        values = copied(lora_request)
        name, revision = values.name, values.revision
        with self._staged(values, "add_lora") as (members, info):
            if not self._table.check_values(name, revision, info.digest):
                self._drop(members)
                with self._lock:
                    return self._table.renumber(name, revision)

            def decide(table: AdapterTable) -> int:
                version = self._brain.policy_version + table.changes_version(name, info.digest)
                self._place(table, msgspec.structs.replace(info, policy_version=version))
                return version

            self._commit(members, decide, "add_lora", values=values)
        return self._table.get(name).info

    def _update(self, lora_request: LoRARequest, version: int | None, kv: KvMode) -> UpdateReport:
        start, values = time.perf_counter(), copied(lora_request)
        with self._staged(values, "update_weights") as (members, info):
            live, known = self._brain.policy_version, self._table.find(values.name)
            if known is not None and (known.info.digest, known.info.policy_version) == (info.digest, version):
                self._drop(members)
                return UpdateReport(
                    known.info.policy_version, info.digest, len(values.tensors or ()), info.num_bytes, 0.0, 0.0, 0
                )
            number = next_version(version, live)
            revision = 0 if known is None else known.info.revision + 1

            def decide(table: AdapterTable) -> int:
                named = max(revision, values.revision)
                self._place(table, msgspec.structs.replace(info, revision=named, policy_version=number))
                return number

            reports = self._commit(members, decide, "update_weights", values=values, kv=kv)
        sizes = dict(digest=info.digest, num_tensors=len(values.tensors or ()))
        sizes |= dict(num_bytes=info.num_bytes, num_bytes_sent=info.num_bytes)
        seconds = time.perf_counter() - start
        each = {i: msgspec.structs.replace(report, **sizes, seconds=seconds) for i, report in reports.items()}
        return whole_report(each)

    def _remove(self, lora_request: str) -> bool:
        if self._table.find(lora_request) is None:
            return False

        def decide(table: AdapterTable) -> int:
            table.remove(lora_request, self._num_using)
            return self._brain.policy_version

        with self._held({}) as members:
            self._commit(members, decide, "remove_lora")
        return True

    def _pin(self, lora_request: str) -> LoRAInfo:
        with self._lock:
            return self._table.pin(lora_request)

    def _num_using(self, adapter: Adapter) -> int:
        """Requests that use an adapter; not those that end as soon as their replica reads that they are to."""
        entries = self._brain.ledger.entries()
        return sum(each.request.lora == adapter.info.name and each.live.keys() > each.aborted for each in entries)

    def _place(self, table: AdapterTable, info: LoRAInfo) -> None:
        table.put(table.place(info.name, self._num_using), info)

    @contextmanager
    def _held(self, errors: dict[int, Exception]) -> Iterator[dict[int, Member]]:
        """The replicas that live, while nobody else changes them. Raises `RetryableError` where none does."""
        with self._lock:
            members = dict(self._members)
        with held(members, _CATCH_UP_SECONDS, errors) as free:
            if not free:
                what = "no replica of the fleet lives at the moment"
                raise next(iter(errors.values()), RetryableError(f"{what}; they are started again: call again later."))
            yield free

    @contextmanager
    def _staged(self, values: LoRARequest, verb: str) -> Iterator[tuple[dict[int, Member], LoRAInfo]]:
        """The replicas that have read and checked an adapter, and what they say of it, which is the same.

        Raises the error of one where none has. What the block does not commit is dropped if it raises.
        """
        infos: dict[int, LoRAInfo] = {}
        errors: dict[int, Exception] = {}
        arguments = {"lora_request": values, "verb": verb}
        with self._held(errors) as members:
            try:
                at_all(members, lambda member: member.client.call("stage_lora", arguments).result(), infos, errors)
                if not infos:
                    raise self._error_of(errors, verb)
                info = next(iter(infos.values()))
                ready = {index: members[index] for index, each in infos.items() if each.digest == info.digest}
                yield ready, info
            except BaseException:
                self._drop(members)
                raise
        for index, error in errors.items():
            logger.warning("replica %d has missed adapter '%s': %s", index, values.name, error)

    def _drop(self, members: Mapping[int, Member]) -> None:
        for member in members.values():
            with suppress(EngineDeadError, LifecycleError):
                member.client.call("drop_loras", {}).result()

    def _commit(
        self,
        members: Mapping[int, Member],
        decide: Callable[[AdapterTable], int],
        verb: str,
        *,
        values: LoRARequest | None = None,
        kv: KvMode = "keep",
    ) -> dict[int, UpdateReport]:
        """Have the replicas commit what `decide` makes of the table, under the policy version that it returns.

        From the decision on, requests may name what the new table has. Raises the error of one replica where none
        commits; then the table is what it was.
        """
        with self._lock:
            before, table = self._table, self._table.copy()
            version = decide(table)
            self._table, loras = table, table.list()
        results: dict[int, tuple[float, int]] = {}
        errors: dict[int, Exception] = {}
        arguments = {"loras": loras, "version": version, "kv": kv, "verb": verb}
        try:
            at_all(members, lambda member: member.client.call("commit_loras", arguments).result(), results, errors)
        finally:
            with self._lock:
                reports = {
                    i: UpdateReport(version, "", 0, 0, *(stall, stall), num) for i, (stall, num) in results.items()
                }
                if not reports:
                    self._table = before
                else:
                    self._num_changes += 1
                    added = {} if values is None else {values.name: values}
                    kept = {info.name: self._values.get(info.digest) for info in loras} | added
                    self._values = {info.digest: found for info in loras if (found := kept[info.name]) is not None}
                    for index in reports:
                        members[index].num_adapter_changes = self._num_changes
                self._ended(members, reports, [index for index, error in errors.items() if _may_have_changed(error)])
        if not reports:
            raise self._error_of(errors, verb)
        return reports

    def _error_of(self, errors: Mapping[int, Exception], verb: str) -> Exception:
        error = next(iter(errors.values()))
        if not isinstance(error, EngineDeadError) or self._is_over():
            return error
        what = f"{verb}: every replica was lost before it had answered"
        return RetryableError(f"{what}; they are started again with the adapters from before: call it again.")


def _may_have_changed(error: Exception) -> bool:
    """Whether a replica's adapters may be others than before; one that is lost starts anew anyway."""
    return not isinstance(error, LifecycleError | RequestError | EngineDeadError)
