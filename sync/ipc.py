"""The ipc transport: trainer and engine are two processes on one CUDA device; bytes never leave it.

    engine                          trainer
    Want(version, digest) ───────>  refuses, or
                          <───────  Shared(handles, what lies where)     opened once, kept from update to update
    copies what lies there
                          <───────  Filled(k)                            packed while k - 1 is taken out
    Taken(k)              ───────>
    Done                  ───────>

What has its form already is copied once, from where the trainer has it to its place. Only what has to be cast, or is
strided or elsewhere, is packed into one of two buffers first.

Handles travel as plain numbers in typed messages over a socket in DIRECTORY, which is this user's alone. Every message
carries the number that its Want drew, so what an attempt that broke off left behind is never taken for an answer.

**Unproven**: sharing memory between processes on a device has not run yet. The protocol is proven with memory of the
host in its place.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from torch import Tensor

from sync.base import GroupReceiver, Metadata, WeightSource
from sync.buckets import Slot, plan_buckets, view_of
from sync.devices import cuda_device
from sync.directories import check_private, make_private, open_sole
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.manifest import WeightManifest, torch_dtype
from sync.offer import HeldOffer, Offer
from sync.shared_memory import CudaMemory, MemoryHandle, SharedMemory
from sync.source import NamedTensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket; there are two. A larger tensor travels alone."""
_SOCKET, _LOCK = "weights.sock", "weights.lock"
_IN_FLIGHT = 2


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    transfer: int
    """Drawn anew by each Want."""


class Want(_Message, frozen=True, forbid_unknown_fields=True):
    """The engine has this manifest, and this memory."""

    version: int
    digest: str
    memory: str


class Lying(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the manifest, in its form."""

    name: str
    handle: int
    """Which of the handles."""
    start: int
    """Byte of that memory."""


class Shared(_Message, frozen=True, forbid_unknown_fields=True):
    """The trainer's memory: the two buffers for what it packs, and that of what lies in its form."""

    handles: list[MemoryHandle]
    bucket_bytes: int
    lying: list[Lying]


class Refused(_Message, frozen=True, forbid_unknown_fields=True):
    """The trainer has something else on offer."""

    reason: str


class Filled(_Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k lies in buffer k mod 2."""

    k: int


class Taken(_Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k has been read; its buffer is free."""

    k: int


class Done(_Message, frozen=True, forbid_unknown_fields=True):
    """All has been read."""


_ToTrainer = Want | Taken | Done
_ToEngine = Shared | Refused | Filled
_Wanted = TypeVar("_Wanted", bound=_Message)


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
        lying = self._lying(offer)
        buckets = plan_buckets([spec for spec in manifest.tensors if spec.name not in lying], self._bucket_bytes)
        self._allocate(max((bucket.num_bytes for bucket in buckets), default=0))
        shared = self._shared(want.transfer, lying)
        self._memory.mark()()
        self.channel.send(shared)
        for k, bucket in enumerate(buckets):
            if k >= _IN_FLIGHT:
                self.channel.expect(Taken, want.transfer)
            for slot in bucket.slots:
                offer.place(offer.index[slot.spec.name], view_of(self._buffers[k % _IN_FLIGHT], slot))
            self._memory.mark()()
            self.channel.send(Filled(want.transfer, k))
        for _ in buckets[-_IN_FLIGHT:]:
            self.channel.expect(Taken, want.transfer)
        self.channel.expect(Done, want.transfer)

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

    def _lying(self, offer: Offer) -> dict[str, Tensor]:
        """What need not be packed."""
        tensors = ((form.name, offer.in_form(i)) for i, form in enumerate(offer.forms))
        return {
            name: tensor
            for name, tensor in tensors
            if tensor is not None and tensor.numel() and self._memory.shares(tensor)
        }

    def _shared(self, transfer: int, lying: Mapping[str, Tensor]) -> Shared:
        storages = [tensor.untyped_storage() for tensor in [*self._buffers, *lying.values()]]
        handles = [self._memory.export(storage) for storage in storages]
        numbers = {handle: number for number, handle in enumerate(dict.fromkeys(handles))}
        places = [
            Lying(name, numbers[handle], int(tensor.storage_offset()) * tensor.itemsize)
            for (name, tensor), handle in zip(lying.items(), handles[_IN_FLIGHT:], strict=True)
        ]
        return Shared(transfer, list(numbers), self._bucket_bytes, places)

    def _allocate(self, num_bytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < num_bytes:
            self._buffers = [self._memory.allocate(max(num_bytes, 1)) for _ in range(_IN_FLIGHT)]


class HandleReceiver(GroupReceiver):
    """The engine's end, over any `SharedMemory`; `IpcReceiver` is the one to use."""

    def __init__(self, directory: Path, memory: SharedMemory, *, timeout: float) -> None:
        self.channel = Channel(directory, binds=False, accepts=_ToEngine, timeout=timeout)
        self._memory = memory
        self._opened: dict[MemoryHandle, Tensor] = {}

    def groups(self, manifest: WeightManifest) -> Generator[list[NamedTensor]]:
        """As `GroupReceiver.groups`, while the sender sends. Tensors are views of the trainer's memory."""
        manifest.check()
        transfer = secrets.randbits(63)
        self.channel.send(Want(transfer, manifest.version, manifest.digest, self._memory.name))
        shared = self.channel.expect(Shared, transfer)
        # Memory of earlier updates is let go, so that a trainer that has other memory now gets it back.
        self._opened = {h: self._opened[h] if h in self._opened else self._memory.open(h) for h in shared.handles}
        memories = [self._opened[handle] for handle in shared.handles]
        specs, lying = {spec.name: spec for spec in manifest.tensors}, []
        for place in shared.lying:
            spec = specs.pop(place.name, None)
            if (
                spec is None
                or place.handle not in range(len(memories))
                or place.start % torch_dtype(spec.dtype).itemsize
            ):
                raise SyncError(f"The trainer says of '{place.name[:200]}' that it lies where no tensor of it can.")
            lying.append((spec.name, _view(memories[place.handle], Slot(spec, place.start))))
        yield lying
        waits: deque[tuple[int, Callable[[], object]]] = deque()  # for buckets that are being taken out
        for k, bucket in enumerate(plan_buckets(list(specs.values()), shared.bucket_bytes)):
            self.channel.expect(Filled, transfer)
            yield [(slot.spec.name, _view(memories[k % _IN_FLIGHT], slot)) for slot in bucket.slots]
            waits.append((k, self._memory.mark()))
            if k:
                self._told_taken(transfer, waits)
        self._memory.mark()()
        while waits:
            self._told_taken(transfer, waits)
        self.channel.send(Done(transfer))

    def close(self) -> None:
        """Let go of the trainer's buffers and close the socket."""
        self._opened = {}
        self.channel.close()

    def _told_taken(self, transfer: int, waits: "deque[tuple[int, Callable[[], object]]]") -> None:
        """The oldest bucket, once it has been."""
        k, wait = waits.popleft()
        wait()
        self.channel.send(Taken(transfer, k))


def _view(memory: Tensor, slot: Slot) -> Tensor:
    name, end = slot.spec.name, slot.start + slot.spec.num_bytes
    if slot.start < 0 or end > memory.numel() or slot.start % torch_dtype(slot.spec.dtype).itemsize:
        what = f"bytes {slot.start} to {end} of {memory.numel()}"
        raise SyncError(f"The trainer says that '{name}' lies in its memory where it cannot: {what}.")
    return view_of(memory, slot)


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
