"""A client's side of weight updates of a core in another process.

    client   begin_weight_update(version, manifest, meeting) ──>   core, on a thread of its own
             <── accepted                                          begin
             send ─────────── by the transport ────────────────>   stage, verify; commit between two steps
             end_weight_update  <── UpdateReport ───────────────

A path is read by the core itself: `load_weights` is all there is.
"""

import os
import threading
from typing import Any

from rollout_engine.errors import LifecycleError, TransferTimeoutError, as_weight_errors
from rollout_engine.frontend.core_client import CoreClient
from rollout_engine.frontend.weight_ends import DEFAULT, Meeting, check_remote, make_directory, remove_directories
from rollout_engine.messages import UpdateOptions
from rollout_engine.outputs import UpdateReport
from sync.base import Metadata, WeightSender, WeightSource
from sync.cast_notice import CastNotice
from sync.source import read_source

_LiveWeights = tuple[int, dict[str, tuple[str, tuple[int, ...]]]]
_GRACE_SECONDS = 10.0
"""How much longer than an update may take its answer is awaited: the core's own deadline comes first, and says why."""


class WeightPusher:
    """Pushes one source after another; the sender and its memory are kept from push to push."""

    def __init__(self, client: CoreClient) -> None:
        self._client = client
        self._pushing = threading.Lock()
        self._cast_notice = CastNotice()
        self._directory, self._lock = "", -1
        self._meeting: Meeting | None = None
        self._sender: WeightSender | None = None
        self._num_groups = 0

    def push(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """One whole update; blocks. Raises as `WeightVerbs.update_weights`, and `EngineDeadError`."""
        transport = DEFAULT if options.transport is None else options.transport
        if isinstance(source, str | os.PathLike):
            if options.transport is not None:
                raise LifecycleError("update_weights: the engine reads a path itself; leave transport=None.")
            path = os.path.abspath(os.path.expanduser(source))
            return self._ask("load_weights", options.timeout, UpdateReport, path=path, version=version, options=options)
        check_remote(transport)
        if not self._pushing.acquire(blocking=False):
            raise LifecycleError("update_weights: another update is under way; wait until it has ended.")
        try:
            return self._push(source, version, transport, options)
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._pushing.release()

    def close(self) -> None:
        """Let go of the transport and its memory."""
        if self._directory and self._client.owner.is_here:
            self._disconnect()
            remove_directories(self._client.directory, self._client.client_index)
            os.close(self._lock)
            self._directory = ""

    def _push(self, source: WeightSource, version: int | None, transport: str, options: UpdateOptions) -> UpdateReport:
        live, metadata = self._ask(
            "get_live_weights", options.timeout, tuple[int, dict[str, tuple[str, tuple[int, ...]]]]
        )
        with as_weight_errors():
            meeting, sender = self._connected(transport, metadata, options.timeout)
            pairs = read_source(source)
            self._cast_notice.look(pairs, metadata)
            manifest = sender.offer(pairs, live + 1 if version is None else version, metadata)
        accepted = self._ask(
            "begin_weight_update", options.timeout, bool, manifest=manifest, meeting=meeting, options=options
        )
        try:
            if accepted:
                with as_weight_errors():
                    sender.send()
        finally:
            report = self._ask("end_weight_update", options.timeout, UpdateReport)  # says why, where sending failed
        return report

    def _connected(self, transport: str, metadata: Metadata, timeout: float) -> tuple[Meeting, WeightSender]:
        if self._sender is None or self._meeting is None or self._meeting.transport != transport:
            self._disconnect()
            if not self._directory:
                core, index = self._client.directory, self._client.client_index
                self._directory, self._lock = make_directory(core, index, metadata)
            self._num_groups += 1
            self._meeting = Meeting(transport, self._directory, timeout, self._num_groups)
            self._sender = self._meeting.make_sender()
        return self._meeting, self._sender

    def _disconnect(self) -> None:
        sender, self._sender, self._meeting = self._sender, None, None
        if sender is not None:
            sender.close()

    def _ask(self, name: str, timeout: float, kind: Any, **arguments: Any) -> Any:
        answer = self._client.call(name, kind, **arguments)
        try:
            return answer.result(timeout + _GRACE_SECONDS)
        except TimeoutError:
            if answer.done():  # it is the answer
                raise
            self._client.call("abort_weight_update")
            what = f"The engine did not answer within {timeout + _GRACE_SECONDS:g} s"
            raise TransferTimeoutError(f"update_weights: {what}; the update is called off.") from None
