"""LoRA adapters of a fleet: every replica that serves has the same ones, with the same values.

add_lora ── every replica: read, check ── the fleet decides: ── every replica: have exactly these adapters, between
            steps continue                which gives way       two steps; one that fails has missed it, and catches up

The fleet keeps the values, for replicas that start later or have missed a change.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import EngineDeadError, LifecycleError, RequestError, TransferTimeoutError
from rollout_engine.base.lora_request import LoRAInfo, LoRARequest
from rollout_engine.base.messages import KvMode
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import start_thread
from rollout_engine.core.adapters import Adapter, AdapterTable
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.verbs import VERBS
from rollout_engine.fleet.plan.brain import Brain
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.update_round import Round, begin_round, whole_report
from rollout_engine.model.adapters.peft_format import copied

ADAPTER_VERBS = ("add_lora", "ensure_lora", "list_loras", "pin_lora", "remove_lora", "update_lora")
_LOOK_SECONDS = 0.05
"""How often a change that waits for its turn checks whether its caller still waits."""
_CATCH_UP_SECONDS = 30.0
"""How long a change waits for a replica that is catching up; then that replica has missed it."""


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
        and as that of `FleetUpdates.push_to_replicas`."""
        self._brain, self._members, self._lock = brain, members, lock
        self._is_over, self._ended = is_over, ended
        self._table = AdapterTable(max_loras)
        self._values: dict[str, LoRARequest] = {}
        """By the digest of an adapter; copies that no caller changes."""
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
        """Hold off changes. Raises `TransferTimeoutError` if one is still under way after `seconds`."""
        if not self._changing.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            what = f"update_weights: adapters were still being changed after {seconds:g} s"
            raise TransferTimeoutError(f"{what}; nothing is changed: update again.")
        try:
            yield
        finally:
            self._changing.release()

    def use(self, name: str) -> None:
        """Note that a new request names an adapter. Raises `RequestError` for one that the fleet does not have."""
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
        """Call one of `ADAPTER_VERBS` on the fleet. A change continues to its end once it has begun."""
        checked, future = VERBS[name].bind_arguments(arguments), CallFuture()
        checked.pop("timeout")  # the caller cancels the call then
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
        with self._lock:
            return self._table.find_served(request)

    def _add(self, lora_request: LoRARequest) -> LoRAInfo:
        values = copied(lora_request)
        with self._staged(values, "add_lora") as (change, staged):
            with self._lock:
                info = self._table.plan_add(staged, self._brain.policy_version)
            self._put(change, info, values)
        return self._table.get(values.name).info

    def _update(self, lora_request: LoRARequest, version: int | None, kv: KvMode) -> UpdateReport:
        start, values = time.perf_counter(), copied(lora_request)
        with self._staged(values, "update_weights") as (change, staged):
            with self._lock:
                info = self._table.plan_update(staged, version, self._brain.policy_version)
            reports = self._put(change, info, values, kv)
        sizes: Any = dict(digest=staged.digest, num_tensors=len(values.tensors or ()), num_bytes=staged.num_bytes)
        if info is None:
            known = self._table.get(values.name).info
            return UpdateReport(known.policy_version, **sizes, seconds=0.0, stall_seconds=0.0, num_in_flight=0)
        sizes |= dict(num_bytes_sent=staged.num_bytes, seconds=time.perf_counter() - start)
        return whole_report({i: msgspec.structs.replace(report, **sizes) for i, report in reports.items()})

    def _remove(self, lora_request: str) -> bool:
        if self._table.find(lora_request) is None:
            return False

        with begin_round("remove_lora", self._present(), _CATCH_UP_SECONDS) as change:
            version = self._brain.policy_version
            self._commit(change, change.members, version, lambda table: table.remove(lora_request, self._num_using))
        return True

    def _pin(self, lora_request: str) -> LoRAInfo:
        with self._lock:
            return self._table.pin(lora_request)

    def _num_using(self, adapter: Adapter) -> int:
        """Requests that use an adapter; not those that end as soon as their replica reads that they are to."""
        entries = self._brain.ledger.entries()
        return sum(each.request.lora == adapter.info.name and each.live.keys() > each.aborted for each in entries)

    def _put(
        self, change: Round[Any, Any], info: LoRAInfo | None, values: LoRARequest, kv: KvMode = "keep"
    ) -> dict[int, UpdateReport]:
        """Have the replicas that have staged an adapter commit it as the table has planned; None: drop it."""
        if info is None:
            self._drop(change.members)
            return {}

        def place(table: AdapterTable) -> None:
            table.put(table.place(info.name, self._num_using), info)

        return self._commit(change, change.staged, info.policy_version, place, values=values, kv=kv)

    def _present(self) -> dict[int, Member]:
        with self._lock:
            return dict(self._members)

    @contextmanager
    def _staged(self, values: LoRARequest, verb: str) -> Iterator[tuple[Round[Any, Any], LoRAInfo]]:
        """Have all replicas read and check an adapter; `staged` has those that have read the same.

        Raises the error of one if none has. If the block raises, drops the adapters that it has not committed.
        """
        arguments = {"lora_request": values, "verb": verb}
        with begin_round(verb, self._present(), _CATCH_UP_SECONDS) as change:
            try:
                change.stage(lambda member: member.client.call("stage_lora", arguments).result())
                if not change.staged:
                    raise change.failure("adapters", self._is_over)
                info = next(iter(change.staged.values()))
                change.staged = {index: each for index, each in change.staged.items() if each.digest == info.digest}
                yield change, info
            except BaseException:
                self._drop(change.members)
                raise
        change.log_missed(f"adapter '{values.name}'")

    def _drop(self, members: Mapping[int, Member]) -> None:
        for member in members.values():
            with suppress(EngineDeadError, LifecycleError):
                member.client.call("drop_loras", {}).result()

    def _commit(
        self,
        change: Round[Any, Any],
        indexes: Collection[int],
        version: int,
        edit: Callable[[AdapterTable], object],
        *,
        values: LoRARequest | None = None,
        kv: KvMode = "keep",
    ) -> dict[int, UpdateReport]:
        """Have replicas commit the table as `edit` changes it, as policy version `version`.

        From the decision on, requests may name the adapters of the new table. Raises the error of one replica if none
        commits; then the table is as before.
        """
        with self._lock:
            before, table = self._table, self._table.copy()
            edit(table)
            self._table, loras = table, table.list()
        arguments = {"loras": loras, "version": version, "kv": kv, "verb": change.verb}
        try:
            change.commit(indexes, lambda member: member.client.call("commit_loras", arguments).result())
        finally:
            with self._lock:
                reports = {
                    i: UpdateReport(version, "", 0, 0, *(stall, stall), num)
                    for i, (stall, num) in change.committed.items()
                }
                if not reports:
                    self._table = before
                else:
                    self._num_changes += 1
                    added = {} if values is None else {values.name: values}
                    kept = {info.name: self._values.get(info.digest) for info in loras} | added
                    self._values = {info.digest: found for info in loras if (found := kept[info.name]) is not None}
                    for index in reports:
                        change.members[index].num_adapter_changes = self._num_changes
                errors = change.errors.items()
                in_doubt = [index for index, error in errors if index in indexes and _may_have_changed(error)]
                self._ended(change.members, reports, in_doubt)
        if not reports:
            raise change.failure("adapters", self._is_over)
        return reports


def _may_have_changed(error: Exception) -> bool:
    """Whether a replica's adapters may be others than before; one that is lost restarts anyway."""
    return not isinstance(error, LifecycleError | RequestError | EngineDeadError)
