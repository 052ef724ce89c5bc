"""Sends weight updates to a core in another process.

    client   begin_weight_update(version, manifest, rendezvous) ──>   core, on a thread of its own
             <── accepted                                          begin
             send ─────────── by the transport ────────────────>   stage, verify; commit between two steps
             end_weight_update  <── UpdateReport ───────────────

A path is read by the core itself:

    client   stage_weights(path)  ────────────────────────────>   begin, stage, verify
             <── version, digest
             end_weight_update  ──────────────────────────────>   commit between two steps
             <── UpdateReport
"""

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Protocol

from rollout_engine.base.errors import LifecycleError, TransferTimeoutError, as_weight_errors
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import raise_if_cancelled
from rollout_engine.process.weight_rendezvous import (
    DEFAULT,
    Rendezvous,
    check_near,
    check_remote,
    make_directory,
    remove_directories,
)
from sync.base import Metadata, WeightSender, WeightSource
from sync.cast_notice import CastNotice
from sync.offer import check_source
from sync.owner_process import OwnerProcess
from sync.source import read_source

_GRACE_SECONDS = 10.0
"""Seconds added to an update's timeout while waiting for its answer: the core's own error is earlier and clearer."""
_LOOK_SECONDS = 0.05
"""Seconds between an update's checks that a caller still awaits it."""


class Caller(Protocol):
    """The client of the core whose weights are updated."""

    @property
    def index(self) -> int:
        """Which client of its core it is."""
        ...

    @property
    def address(self) -> str:
        """Directory of the core, or its TCP address."""
        ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[Any]:
        """Call a verb of the core."""
        ...


class WeightClient:
    """Pushes weights to one core. The sender and its memory are kept from push to push."""

    def __init__(self, client: Caller) -> None:
        self._client, self._owner = client, OwnerProcess()
        self._pushing = threading.Lock()
        self._cast_notice = CastNotice()
        self._directory, self._lock = "", -1
        self._rendezvous: Rendezvous | None = None
        self._sender: WeightSender | None = None
        self._sends_draft = False
        """Whether the sender's weights are the draft model's."""
        self._num_groups = 0

    def push_to_core(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """Carry out one whole update; blocks. Raises as `Frontend.update_weights`, and `EngineDeadError`."""
        transport = DEFAULT if options.transport is None else options.transport
        if isinstance(source, str | os.PathLike):
            if options.transport is not None:
                raise LifecycleError("update_weights: the engine reads a path itself; leave transport=None.")
            try:
                self.stage(os.path.abspath(os.path.expanduser(source)), version, options)
                return self.commit(options.timeout)
            except BaseException as problem:
                if not isinstance(problem, Exception):  # interrupted or cancelled, perhaps between the two
                    self._call_off()
                raise
        check_remote(transport)
        check_near(transport, self._client.address)
        if not self._pushing.acquire(blocking=False):
            raise LifecycleError("update_weights: another update is under way; wait until it has ended.")
        try:
            if options.draft != self._sends_draft:  # the kept sender has the other model's tensors
                self._disconnect()
                self._sends_draft = options.draft
            return self._push(source, version, transport, options)
        except BaseException as problem:
            self._disconnect()
            if not isinstance(problem, Exception):  # interrupted or cancelled, perhaps between two calls
                self._call_off()
            raise
        finally:
            self._pushing.release()

    def stage(self, path: str, version: int | None, options: UpdateOptions) -> tuple[int, str]:
        """Have the core stage weights that it reads at an absolute path, and hold it; returns version and digest."""
        staged: tuple[int, str] = self._ask(
            "stage_weights", options.timeout, path=path, version=version, options=options
        )
        return staged

    def commit(self, timeout: float) -> UpdateReport:
        """Have the core commit the staged weights."""
        report: UpdateReport = self._ask("end_weight_update", timeout)
        return report

    def drop(self) -> UpdateReport | None:
        """Have the core drop the staged weights, and wait until it has. Returns its report if it committed them.

        Raises `TransferTimeoutError` if the core does not answer: it may have committed, or not.
        """
        self._call_off()
        answer = self._client.call("end_weight_update", {})
        wait([answer], _GRACE_SECONDS)
        if not answer.done():
            answer.cancel()
            what = f"The engine did not answer within {_GRACE_SECONDS:g} s"
            raise TransferTimeoutError(f"update_weights: {what}: what is staged may have been committed, or not.")
        return None if answer.exception() else answer.result()

    def close(self) -> None:
        """Free the transport and its memory."""
        if self._directory and self._owner.is_current:
            self._disconnect()
            remove_directories(self._client.address, self._client.index)
            os.close(self._lock)
            self._directory = ""

    def _push(self, source: WeightSource, version: int | None, transport: str, options: UpdateOptions) -> UpdateReport:
        live, metadata, names = self._ask("get_live_weights", options.timeout, draft=options.draft)
        with as_weight_errors():
            rendezvous, sender = self._connect_sender(transport, metadata, options.timeout)
            pairs = names.used(read_source(source), metadata)
            check_source(pairs, metadata)
            self._cast_notice.warn_if_cast(pairs, metadata)
            if not options.delta:
                sender.forget()
            manifest = sender.offer(pairs, live + 1 if version is None else version, metadata)
        accepted = self._ask(
            "begin_weight_update", options.timeout, manifest=manifest, rendezvous=rendezvous, options=options
        )
        try:
            if accepted:
                with as_weight_errors():
                    sender.send()
        except Exception:
            self._ask("end_weight_update", options.timeout)  # its error explains
            raise
        report: UpdateReport = self._ask("end_weight_update", options.timeout)
        return report

    def _connect_sender(self, transport: str, metadata: Metadata, timeout: float) -> tuple[Rendezvous, WeightSender]:
        if self._sender is None or self._rendezvous is None or self._rendezvous.transport != transport:
            self._disconnect()
            if not self._directory:
                core, index = self._client.address, self._client.index
                self._directory, self._lock = make_directory(core, index, metadata)
            self._num_groups += 1
            self._rendezvous = Rendezvous(transport, self._directory, timeout, self._num_groups)
            self._sender = self._rendezvous.make_sender()
        return self._rendezvous, self._sender

    def _disconnect(self) -> None:
        sender, self._sender, self._rendezvous = self._sender, None, None
        if sender is not None:
            sender.close()

    def _call_off(self) -> None:
        self._client.call("abort_weight_update", {})

    def _ask(self, name: str, timeout: float, **arguments: Any) -> Any:
        raise_if_cancelled()
        answer, deadline = self._client.call(name, arguments), time.monotonic() + timeout + _GRACE_SECONDS
        try:
            while not answer.done() and time.monotonic() < deadline:
                wait([answer], _LOOK_SECONDS)
                raise_if_cancelled()
            return answer.result(0)
        except TimeoutError:
            if answer.done():  # the core raised it
                raise
            what = f"The engine did not answer within {timeout + _GRACE_SECONDS:g} s"
            raise TransferTimeoutError(f"update_weights: {what}; the update is called off.") from None
        finally:
            if not answer.done():  # too late, interrupted or cancelled
                answer.cancel()
                self._call_off()
