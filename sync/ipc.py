"""The ipc transport: trainer and engine are two processes on one CUDA device; bytes never leave it.

    engine                          trainer
    Want(version, digest) ───────>  refuses, or
                          <───────  Buckets(handles of two buffers)      opened once, kept from update to update
                          <───────  Filled(k)                            packed while k - 1 is taken out
    Taken(k)              ───────>

Handles travel as plain numbers in typed messages over a socket in DIRECTORY, which is this user's alone. Every message
carries the number that its Want drew, so what an attempt that broke off left behind is never taken for an answer.

**Unproven**: sharing memory between processes on a device has not run yet. The protocol is proven with memory of the
host in its place.
"""

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import zmq
from torch import Tensor

from sync.base import Metadata, WeightReceiver, WeightSource
from sync.buckets import plan_buckets, view_of
from sync.devices import cuda_device
from sync.directories import check_private, make_private, open_sole
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.manifest import WeightManifest
from sync.source import HeldOffer, NamedTensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket; there are two. A larger tensor travels alone."""
_SOCKET, _LOCK = "weights.sock", "weights.lock"
_IN_FLIGHT = 2


class MemoryHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of another process, as CUDA and torch's allocator name it."""

    storage: bytes
    num_bytes: int
    offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    transfer: int
    """Drawn anew by each Want."""


class Want(_Message, frozen=True, forbid_unknown_fields=True):
    """The engine has this manifest, and this memory."""

    version: int
    digest: str
    memory: str


class Buckets(_Message, frozen=True, forbid_unknown_fields=True):
    """The trainer's buffers, and how it packs."""

    handles: tuple[MemoryHandle, MemoryHandle]
    bucket_bytes: int


class Refused(_Message, frozen=True, forbid_unknown_fields=True):
    """The trainer has something else on offer."""

    reason: str


class Filled(_Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k lies in buffer k mod 2."""

    k: int


class Taken(_Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k has been read; its buffer is free."""

    k: int


_ToTrainer = Want | Taken
_ToEngine = Buckets | Refused | Filled
_Wanted = TypeVar("_Wanted", bound=_Message)


class SharedMemory(Protocol):
    """Memory that another process can open by a handle."""

    name: str
    """Equal on both sides exactly if they can share."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]."""

    def export(self, buffer: Tensor) -> MemoryHandle:
        """The handle of a buffer that `allocate` made."""

    def open(self, handle: MemoryHandle) -> Tensor:
        """The other process's buffer, uint8."""

    def settle(self) -> None:
        """Return once all work on the memory that was started here is done."""


class CudaMemory:
    """Memory of one CUDA device, shared through CUDA's IPC handles. Unproven."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        """As `SharedMemory.allocate`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, buffer: Tensor) -> MemoryHandle:
        """As `SharedMemory.export`."""
        # The other process has its own numbering of devices; the name says that it is the same one.
        whole: Any = buffer.untyped_storage()
        _, storage, num_bytes, offset, counter, counter_offset, event, sync_required = whole._share_cuda_()
        return MemoryHandle(storage, num_bytes, offset, counter, counter_offset, event, sync_required)

    def open(self, handle: MemoryHandle) -> Tensor:
        """As `SharedMemory.open`."""
        storage_class: Any = torch.UntypedStorage
        storage = storage_class._new_shared_cuda(
            self._device.index,
            handle.storage,
            handle.num_bytes,
            handle.offset,
            handle.ref_counter,
            handle.ref_counter_offset,
            handle.event,
            handle.event_sync_required,
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def settle(self) -> None:
        """As `SharedMemory.settle`."""
        torch.cuda.synchronize(self._device)


class Channel:
    """One end of the socket: typed messages with a deadline. Frames that are none are counted and dropped."""

    def __init__(self, directory: Path, *, binds: bool, accepts: Any, timeout: float) -> None:
        if not timeout > 0:
            raise SyncError(f"timeout={timeout} is not allowed: must be seconds, more than 0.")
        self.num_dropped = 0
        self._accepts, self._timeout = accepts, timeout
        self._lock = -1
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        address = f"ipc://{directory / _SOCKET}"
        try:
            if binds:
                make_private(directory)
                self._lock = open_sole(directory / _LOCK)  # binding alone would take the address from another
                self._socket.bind(address)
            else:
                check_private(directory)
                self._socket.connect(address)
        except (OSError, SyncError) as problem:
            self.close()
            raise SyncError(f"Trainer and engine cannot meet in {directory}: {problem}") from None

    def send(self, message: _Message) -> None:
        """`TransferTimeout` when nobody takes it."""
        if not self._socket.poll(int(self._timeout * 1e3), zmq.POLLOUT):
            raise TransferTimeout(f"Nobody came to take weights within {self._timeout:g} s.")
        self._socket.send(msgspec.msgpack.encode(message))

    def expect(self, kind: type[_Wanted], transfer: int | None = None, *, latest: bool = False) -> _Wanted:
        """The next message of `kind` (of `transfer`), dropping others; a `Refused` of it is raised.

        `latest` takes the last of those that are there. `TransferTimeout` when none comes.
        """
        deadline = time.monotonic() + self._timeout
        found: _Wanted | None = None
        while self._socket.poll(0 if found else max(int((deadline - time.monotonic()) * 1e3), 0)):
            message = self._decoded(self._socket.recv())
            if message is None or transfer not in (None, message.transfer):
                self.num_dropped += 1
            elif isinstance(message, Refused):
                raise ManifestMismatch(message.reason)
            elif isinstance(message, kind):
                found = message
                if not latest:
                    break
            else:
                self.num_dropped += 1
        if found is None:
            raise TransferTimeout(f"The other side of the weight transport was silent for {self._timeout:g} s.")
        return found

    def _decoded(self, frame: bytes) -> _Message | None:
        try:
            message: _Message = msgspec.msgpack.decode(frame, type=self._accepts)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return message

    def close(self) -> None:
        """Close the socket. No-op the second time."""
        self._socket.close()
        self._context.term()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class HandleSender:
    """The trainer's end, over any `SharedMemory`; `IpcSender` is the one to use."""

    def __init__(self, directory: Path, memory: SharedMemory, *, timeout: float, bucket_bytes: int) -> None:
        if type(bucket_bytes) is not int or not 1 <= bucket_bytes <= 2**40:
            raise SyncError(f"bucket_bytes={bucket_bytes!r} is not allowed: must be an int in [1, 2**40].")
        self.channel = Channel(directory, binds=True, accepts=_ToTrainer, timeout=timeout)
        self._memory, self._bucket_bytes = memory, bucket_bytes
        self._buffers: list[Tensor] = []
        self._held = HeldOffer()

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """As `WeightSender.offer`. Holds references to the source's tensors, and copies of gathered ones."""
        return self._held.make(source, version, metadata)

    def send(self) -> None:
        """As `WeightSender.send`, to one engine."""
        offer, manifest = self._held.get()
        want = self.channel.expect(Want, latest=True)  # not one of an engine that gave up
        self._check(want, manifest)
        buckets = plan_buckets(manifest.tensors, self._bucket_bytes)
        self._allocate(max((bucket.num_bytes for bucket in buckets), default=0))
        first, second = (self._memory.export(buffer) for buffer in self._buffers)
        self.channel.send(Buckets(want.transfer, (first, second), self._bucket_bytes))
        for k, bucket in enumerate(buckets):
            if k >= _IN_FLIGHT:
                self.channel.expect(Taken, want.transfer)
            for slot in bucket.slots:
                offer.place(offer.index[slot.spec.name], view_of(self._buffers[k % _IN_FLIGHT], slot))
            self._memory.settle()
            self.channel.send(Filled(want.transfer, k))
        for _ in buckets[-_IN_FLIGHT:]:
            self.channel.expect(Taken, want.transfer)

    def close(self) -> None:
        """Drop the source and the buffers, and close the socket."""
        self._held.drop()
        self._buffers = []
        self.channel.close()

    def _check(self, want: Want, manifest: WeightManifest) -> None:
        reason = ""
        if want.memory != self._memory.name:
            reason = "Trainer and engine are on different devices: use 'nccl' between devices."
        elif (want.version, want.digest) != (manifest.version, manifest.digest):
            reason = f"Version {want.version} is not, or no longer, on offer: version {manifest.version} is."
        if reason:
            self.channel.send(Refused(want.transfer, reason))
            raise ManifestMismatch(reason)

    def _allocate(self, num_bytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < num_bytes:
            self._buffers = [self._memory.allocate(max(num_bytes, 1)) for _ in range(_IN_FLIGHT)]


class HandleReceiver(WeightReceiver):
    """The engine's end, over any `SharedMemory`; `IpcReceiver` is the one to use."""

    def __init__(self, directory: Path, memory: SharedMemory, *, timeout: float) -> None:
        self.channel = Channel(directory, binds=False, accepts=_ToEngine, timeout=timeout)
        self._memory = memory
        self._opened: dict[MemoryHandle, Tensor] = {}

    def receive(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """As `WeightReceiver.receive`, while the sender sends. Tensors are views of the trainer's buffers."""
        manifest.check()
        transfer = secrets.randbits(63)
        self.channel.send(Want(transfer, manifest.version, manifest.digest, self._memory.name))
        buckets = self.channel.expect(Buckets, transfer)
        # Buffers of earlier updates are let go, so that a trainer that made larger ones gets the memory back.
        self._opened = {h: self._opened[h] if h in self._opened else self._memory.open(h) for h in buckets.handles}
        for k, bucket in enumerate(plan_buckets(manifest.tensors, buckets.bucket_bytes)):
            self.channel.expect(Filled, transfer)
            buffer = self._opened[buckets.handles[k % _IN_FLIGHT]]
            if buffer.numel() < bucket.num_bytes:
                raise SyncError(
                    f"The trainer's buffer has {buffer.numel()} bytes; bucket {k} needs {bucket.num_bytes}."
                )
            for slot in bucket.slots:
                yield slot.spec.name, view_of(buffer, slot)
            self._memory.settle()
            self.channel.send(Taken(transfer, k))

    def close(self) -> None:
        """Let go of the trainer's buffers and close the socket."""
        self._opened = {}
        self.channel.close()


class IpcSender(HandleSender):
    """The trainer's end; one engine at the other. Unproven (see the module).

    Args:
        directory: where the two meet; created if absent (mode 0700).
        device: the one that both are on.
        timeout: seconds for each step.
        bucket_bytes: how much travels at once.

    Raises `SyncError` for a device that is not CUDA.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        device: str = "cuda",
        timeout: float = 300.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        memory = CudaMemory(cuda_device("ipc", device))
        super().__init__(Path(directory), memory, timeout=timeout, bucket_bytes=bucket_bytes)


class IpcReceiver(HandleReceiver):
    """The engine's end. Arguments as for `IpcSender`. Unproven (see the module)."""

    def __init__(self, directory: str | os.PathLike[str], *, device: str = "cuda", timeout: float = 300.0) -> None:
        super().__init__(Path(directory), CudaMemory(cuda_device("ipc", device)), timeout=timeout)
