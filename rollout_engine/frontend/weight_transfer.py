"""Weights from a client to a core in another process, through the socket that both have: both ends in this file.

    client  send_weights    begin(manifest) ──> data, data, ... (a few unanswered at a time) ──> end
    core    WeightTransfer  begins, stages and verifies on a thread of its own; commits while the busy loop holds still

The core answers "begin" once the manifest is accepted, each piece of data once it is copied, and "end" with the report.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from rollout_engine.errors import (
    DirtyWeightsError,
    LifecycleError,
    TransferTimeoutError,
    WeightUpdateError,
    as_weight_errors,
)
from rollout_engine.frontend.core_client import CoreClient
from rollout_engine.frontend.wire import Reply, WeightData
from rollout_engine.outputs import UpdateReport
from sync.base import WeightSource
from sync.errors import ChecksumMismatch, TransferTimeout
from sync.manifest import WeightManifest
from sync.source import NamedTensor
from sync.transports import make_sender

PIECE_BYTES = 4 << 20
_WINDOW = 4
"""Pieces on their way at a time."""
_MAX_WAITING = 64

Apply = Callable[[WeightManifest, Iterator[NamedTensor]], UpdateReport]


def send_weights(
    client: CoreClient,
    source: WeightSource,
    *,
    version: int | None,
    kv: str,
    reset_version: bool,
    timeout: float,
) -> UpdateReport:
    """One whole update of the core's weights; blocks. Raises the weight errors; then the old weights serve on."""
    live = client.call("get_model_metadata", dict[str, tuple[str, tuple[int, ...]]]).result(timeout)
    if version is None:
        version = client.call("get_policy_version", int).result(timeout) + 1
    sender = make_sender("inproc")
    try:
        with as_weight_errors():
            manifest = sender.offer(source, version, live)
        begun = client.call(
            "begin_weight_transfer", bool, manifest=manifest, kv=kv, reset_version=reset_version, timeout=timeout
        )
        if begun.result(timeout):
            _send_pieces(client, (sender.read(spec.name) for spec in manifest.tensors), timeout)
        return client.call("end_weight_transfer", UpdateReport).result(timeout)
    except TimeoutError:
        client.call("abort_weight_transfer")
        raise TransferTimeoutError(f"The core did not answer for {timeout:g} s; the old weights serve on.") from None
    finally:
        sender.close()


def _send_pieces(client: CoreClient, tensors: Iterator[torch.Tensor], timeout: float) -> None:
    unanswered: deque[Future[Any]] = deque()
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            unanswered.append(client.ask("weights", _nothing, lambda number, piece=piece: WeightData(number, piece)))
            if len(unanswered) == _WINDOW and not _answered(unanswered.popleft(), timeout):
                return
    while unanswered and _answered(unanswered.popleft(), timeout):
        pass


def _nothing(_: Reply) -> None:
    """Bytes are acknowledged, no more."""


def _answered(piece: Future[Any], timeout: float) -> bool:
    """False: the transfer broke off. Why is the answer to "end"."""
    return piece.exception(timeout) is None


class WeightTransfer:
    """One update that a client has begun. `feed` it; `begun` and `report` resolve on its thread.

    Args:
        apply: runs the update over the tensors as they arrive.
        on_end: called on the transfer's thread when it is over, before `report` resolves: False after a complete
            update, None where the weights are as before, True where they are a mixture.
        timeout: seconds that the next piece may take.
    """

    def __init__(
        self,
        client_index: int,
        manifest: WeightManifest,
        apply: Apply,
        on_end: Callable[[bool | None], None],
        timeout: float,
    ) -> None:
        self.client_index = client_index
        self.begun: Future[bool] = Future()
        """True: send the data. False: these very weights are live already."""
        self.report: Future[UpdateReport] = Future()
        self._manifest, self._apply, self._on_end, self._timeout = manifest, apply, on_end, timeout
        self._pieces: queue.Queue[tuple[np.ndarray, Future[None]] | None] = queue.Queue(_MAX_WAITING)
        self._is_over = False
        threading.Thread(target=self._run, name="weight-transfer", daemon=True).start()

    def feed(self, data: np.ndarray) -> Future[None]:
        """The next bytes; resolved when they are copied."""
        copied: Future[None] = Future()
        try:
            if self._is_over:
                raise LifecycleError("weights: the transfer has ended.")
            self._pieces.put_nowait((data, copied))
        except queue.Full:
            copied.set_exception(WeightUpdateError(f"weights: {_MAX_WAITING} pieces wait already; await the answers."))
        except LifecycleError as error:
            copied.set_exception(error)
        return copied

    def cancel(self) -> None:
        """The client will send nothing more."""
        try:
            self._pieces.put_nowait(None)
        except queue.Full:
            pass  # what waits is more than is needed, or runs into the timeout

    def _run(self) -> None:
        error: Exception | None = None
        report: UpdateReport | None = None
        try:
            report = self._apply(self._manifest, self._tensors())
        except Exception as problem:
            error = problem
        self._is_over = True
        self._refuse_waiting()
        self._on_end(isinstance(error, DirtyWeightsError) or None if error is not None else False)
        if not self.begun.done():
            self.begun.set_result(False) if error is None else self.begun.set_exception(error)
        self.report.set_exception(error) if error is not None else self.report.set_result(report)

    def _tensors(self) -> Iterator[NamedTensor]:
        """The tensors of the manifest, which has been accepted: their sizes are the live weights'."""
        self.begun.set_result(True)
        for spec in self._manifest.tensors:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            room = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
            while len(room):
                room = room[self._copy_next(room, spec.name) :]
            yield spec.name, tensor

    def _copy_next(self, room: np.ndarray, name: str) -> int:
        """Copy a piece to the beginning of `room`; returns its length."""
        try:
            item = self._pieces.get(timeout=self._timeout)
        except queue.Empty:
            raise TransferTimeout(f"nothing of '{name}' came for {self._timeout:g} s") from None
        if item is None:
            raise TransferTimeout(f"the sender left before '{name}' was complete")
        data, copied = item
        if data.dtype != np.uint8 or data.ndim != 1 or not 0 < len(data) <= len(room):
            copied.set_result(None)
            raise ChecksumMismatch(f"a piece of '{name}' has {data.shape} {data.dtype}; {len(room)} bytes are wanted")
        room[: len(data)] = data
        copied.set_result(None)
        return len(data)

    def _refuse_waiting(self) -> None:
        while True:
            try:
                item = self._pieces.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].set_exception(LifecycleError("weights: the transfer has ended."))
