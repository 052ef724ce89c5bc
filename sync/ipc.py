"""The ipc transport: trainer and engine are two processes on one CUDA device; bytes never leave it.

    engine                             trainer
    Request(version, digest) ───────>  refuses, or
                             <───────  Shared(handles, tensors in place)    opened once, kept from update to update
    copies the tensors in place
                             <───────  Filled(k)                            packed while k - 1 is unpacked
    Taken(k)                 ───────>
    Done                     ───────>  or GaveUp, at any point after Shared

A tensor that is contiguous and in the engine's dtype already is copied once, from the trainer's memory to its place in
the engine. Only tensors that have to be cast, or are strided or elsewhere, are packed into one of two buffers first.

Handles travel as plain numbers over a socket in DIRECTORY, which only this user may enter (`sync.ipc_channel`).

Proven on an H200 with torch 2.11 and its default allocator; not with expandable segments.
"""

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from torch import Tensor

from sync.base import GroupReceiver
from sync.buckets import NUM_BUFFERS, Slot, check_bucket_bytes, largest_bucket, plan_buckets, view_of
from sync.devices import cuda_device
from sync.errors import ManifestMismatch, SyncError
from sync.ipc_channel import (
    Channel,
    Done,
    Filled,
    GaveUp,
    InPlaceTensor,
    Refused,
    Request,
    Shared,
    Taken,
    ToEngine,
    ToTrainer,
)
from sync.manifest import WeightManifest, torch_dtype
from sync.offer import HeldOfferSender, Offer
from sync.shared_memory import CudaMemory, MemoryHandle, SharedMemory
from sync.source import NamedTensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket; there are two. A larger tensor travels alone."""
_MAX_REASON = 1000


class HandleSender(HeldOfferSender):
    """The trainer's end, over any `SharedMemory`, to one engine. Users make an `IpcSender`."""

    def __init__(self, directory: Path, memory: SharedMemory, *, timeout: float, bucket_bytes: int) -> None:
        super().__init__()
        check_bucket_bytes(bucket_bytes)
        self.channel = Channel(directory, binds=True, accepts=ToTrainer, timeout=timeout)
        self._memory, self._bucket_bytes = memory, bucket_bytes
        self._buffers: list[Tensor] = []

    def send(self) -> None:
        offer, manifest = self._require_offer()
        request = self.channel.expect(Request, latest=True)  # earlier ones are of engines that gave up
        self._check(request, manifest)
        in_place = self._in_place(offer)
        buckets = plan_buckets([spec for spec in manifest.tensors if spec.name not in in_place], self._bucket_bytes)
        self._reserve(largest_bucket(buckets))
        shared = self._share(request.transfer, in_place)
        self.channel.await_device(self._memory.mark())
        self.channel.send(shared)
        for k, bucket in enumerate(buckets):
            if k >= NUM_BUFFERS:
                self.channel.expect(Taken, request.transfer)
            offer.pack(bucket, self._buffers[k % NUM_BUFFERS])
            self.channel.await_device(self._memory.mark())
            self.channel.send(Filled(request.transfer, k))
        for _ in buckets[-NUM_BUFFERS:]:
            self.channel.expect(Taken, request.transfer)
        self.channel.expect(Done, request.transfer)

    def close(self) -> None:
        super().close()
        self._buffers = []
        self.channel.close()

    def _check(self, request: Request, manifest: WeightManifest) -> None:
        reason = ""
        if request.memory != self._memory.name:
            reason = "Trainer and engine are on different devices: use 'nccl' between devices."
        elif (request.version, request.digest) != (manifest.version, manifest.digest):
            reason = f"Version {request.version} is not, or no longer, on offer: version {manifest.version} is."
        if reason:
            self.channel.send(Refused(request.transfer, reason))
            raise ManifestMismatch(reason)

    def _in_place(self, offer: Offer) -> dict[str, Tensor]:
        """The tensors that need not be packed."""
        tensors = ((spec.name, offer.as_is(i)) for i, spec in enumerate(offer.specs))
        return {
            name: tensor
            for name, tensor in tensors
            if tensor is not None and tensor.numel() and self._memory.shares(tensor)
        }

    def _share(self, transfer: int, in_place: Mapping[str, Tensor]) -> Shared:
        storages = [tensor.untyped_storage() for tensor in [*self._buffers, *in_place.values()]]
        handles = [self._memory.export(storage) for storage in storages]
        numbers = {handle: number for number, handle in enumerate(dict.fromkeys(handles))}
        places = [
            InPlaceTensor(name, numbers[handle], int(tensor.storage_offset()) * tensor.itemsize)
            for (name, tensor), handle in zip(in_place.items(), handles[NUM_BUFFERS:], strict=True)
        ]
        return Shared(transfer, list(numbers), self._bucket_bytes, places)

    def _reserve(self, num_bytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < num_bytes:
            self._buffers = [self._memory.allocate(max(num_bytes, 1)) for _ in range(NUM_BUFFERS)]


class HandleReceiver(GroupReceiver):
    """The engine's end, over any `SharedMemory`. Users make an `IpcReceiver`."""

    def __init__(self, directory: Path, memory: SharedMemory, *, timeout: float) -> None:
        self.channel = Channel(directory, binds=False, accepts=ToEngine, timeout=timeout)
        self._memory = memory
        self._opened: dict[MemoryHandle, Tensor] = {}

    def groups(self, manifest: WeightManifest) -> Generator[list[NamedTensor]]:
        """Yield the tensors in place, then those of each bucket, as views of the trainer's memory."""
        manifest.check()
        transfer = secrets.randbits(63)
        self.channel.send(Request(transfer, manifest.version, manifest.digest, self._memory.name))
        shared = self.channel.expect(Shared, transfer)
        try:
            yield from self._shared_groups(manifest, shared)
        except BaseException as problem:
            reason = str(problem) or "its update was ended"
            with contextlib.suppress(SyncError):
                self.channel.send(GaveUp(transfer, reason[:_MAX_REASON]), waits=False)
                self.channel.await_device(self._memory.mark())  # memory is closed later, perhaps on another thread
            raise

    def close(self) -> None:
        self.channel.close()
        opened, self._opened = self._opened, {}
        self._memory.close([opened.pop(handle) for handle in [*opened]])

    def _shared_groups(self, manifest: WeightManifest, shared: Shared) -> Generator[list[NamedTensor]]:
        transfer = shared.transfer
        check_bucket_bytes(shared.bucket_bytes)
        if len(shared.handles) < NUM_BUFFERS:
            raise SyncError(f"The trainer shares {len(shared.handles)} memories: at least {NUM_BUFFERS} are expected.")
        memories = self._open(shared.handles)
        specs, in_place = {spec.name: spec for spec in manifest.tensors}, []
        for place in shared.in_place:
            spec = specs.pop(place.name, None)
            if spec is None or place.handle not in range(len(memories)):
                raise SyncError(
                    f"The trainer shares '{place.name[:200]}', which is not in the manifest or not in its memory."
                )
            in_place.append((spec.name, _view(memories[place.handle], Slot(spec, place.start))))
        yield in_place
        pending: deque[tuple[int, Callable[[float], bool]]] = deque()  # buckets being unpacked, how to wait for each
        for k, bucket in enumerate(plan_buckets(list(specs.values()), shared.bucket_bytes)):
            self.channel.expect(Filled, transfer)
            yield [(slot.spec.name, _view(memories[k % NUM_BUFFERS], slot)) for slot in bucket.slots]
            pending.append((k, self._memory.mark()))
            if k:
                self._send_taken(transfer, *pending.popleft())
        self.channel.await_device(self._memory.mark())
        while pending:
            self._send_taken(transfer, *pending.popleft())
        self.channel.send(Done(transfer))

    def _open(self, handles: list[MemoryHandle]) -> list[Tensor]:
        """The trainer's memory. Memory that earlier updates opened is closed, so that the trainer can free it."""
        known, opened = self._opened, dict[MemoryHandle, Tensor]()
        for handle in handles:
            before = known.get(handle)
            opened[handle] = self._memory.open(handle) if before is None else before
        self._opened = opened
        self._memory.close([known.pop(handle) for handle in [*known] if handle not in opened])
        return [opened[handle] for handle in handles]

    def _send_taken(self, transfer: int, k: int, wait: Callable[[float], bool]) -> None:
        self.channel.await_device(wait)
        self.channel.send(Taken(transfer, k))


def _view(memory: Tensor, slot: Slot) -> Tensor:
    """The tensor of `slot`, after a check that it is within `memory`; the numbers come from another process."""
    name, end = slot.spec.name, slot.start + slot.spec.num_bytes
    if slot.start < 0 or end > memory.numel() or slot.start % torch_dtype(slot.spec.dtype).itemsize:
        what = f"The trainer shares bytes {slot.start} to {end} of {memory.numel()} as '{name}'"
        raise SyncError(f"{what}, which are not aligned or not within its memory.")
    return view_of(memory, slot)


class IpcSender(HandleSender):
    """The trainer's end; one engine at the other.

    Args:
        directory: the meeting place of both ends; created if absent (mode 0700).
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
    """The engine's end. Arguments as for `IpcSender`."""

    def __init__(self, directory: str | os.PathLike[str], *, device: str = "cuda", timeout: float = 300.0) -> None:
        super().__init__(Path(directory), CudaMemory(cuda_device("ipc", device)), timeout=timeout)
