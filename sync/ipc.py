"""The ipc transport: trainer and engine are two processes on one CUDA device; bytes never leave it.

    engine                             trainer
    Request(version, digest) ───────>  refuses, or
                             <───────  Shared(handles, tensors in place)    opened once, kept from update to update
    copies the tensors in place
                             <───────  Filled(k)                            packed while k - 1 is unpacked
    Taken(k)                 ───────>
    Done                     ───────>

A tensor that is contiguous and in the engine's dtype already is copied once, from the trainer's memory to its place in
the engine. Only tensors that have to be cast, or are strided or elsewhere, are packed into one of two buffers first.

Handles travel as plain numbers in typed messages over a socket in DIRECTORY, which only this user may enter. Every
message carries the number that its Request drew, so messages of an earlier attempt are never taken for an answer.

**Unproven**: sharing memory between processes on a device has not run yet. The protocol is proven with memory of the
host in its place.
"""

import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from torch import Tensor

from sync.base import GroupReceiver
from sync.buckets import NUM_BUFFERS, Slot, check_bucket_bytes, largest_bucket, plan_buckets, view_of
from sync.devices import cuda_device
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.groups import check_timeout
from sync.manifest import WeightManifest, torch_dtype
from sync.offer import HeldOfferSender, Offer
from sync.shared_files import check_private, make_private, open_sole
from sync.shared_memory import CudaMemory, MemoryHandle, SharedMemory
from sync.source import NamedTensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket; there are two. A larger tensor travels alone."""
_MAX_MESSAGE_BYTES = 64 << 20
_SOCKET, _LOCK = "weights.sock", "weights.lock"
_CLOSED = "This end of the weight transport was closed."


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    transfer: int
    """Number of this transfer, drawn anew by each Request."""


class Request(_Message, frozen=True, forbid_unknown_fields=True):
    """The engine asks for the weights of this manifest; `memory` names what it can open."""

    version: int
    digest: str
    memory: str


class InPlaceTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that the engine copies from the trainer's own memory."""

    name: str
    handle: int
    """Index in `Shared.handles`."""
    start: int
    """First byte of the tensor in that memory."""


class Shared(_Message, frozen=True, forbid_unknown_fields=True):
    """The trainer's memory: first the two buffers for packed tensors, then that of tensors in place."""

    handles: list[MemoryHandle]
    bucket_bytes: int
    in_place: list[InPlaceTensor]


class Refused(_Message, frozen=True, forbid_unknown_fields=True):
    """The trainer has something else on offer."""

    reason: str


class Filled(_Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k is in buffer k mod 2."""

    k: int


class Taken(_Message, frozen=True, forbid_unknown_fields=True):
    """Bucket k has been unpacked; its buffer is free."""

    k: int


class Done(_Message, frozen=True, forbid_unknown_fields=True):
    """Everything has been unpacked."""


_ToTrainer = Request | Taken | Done
_ToEngine = Shared | Refused | Filled
_Expected = TypeVar("_Expected", bound=_Message)


class Channel:
    """One end of the socket: typed messages with a deadline. Invalid frames are counted and dropped.

    One thread sends and receives; any thread may close. A socket is closed by a thread that has it to itself: where one
    waits at it, `close` wakes that one, and it closes the socket on its way out.
    """

    def __init__(self, directory: Path, *, binds: bool, accepts: Any, timeout: float) -> None:
        check_timeout(timeout)
        self.num_dropped = 0
        self._accepts, self._timeout = accepts, timeout
        self._lock = -1
        self._in_use, self._closing = threading.Lock(), threading.Lock()
        self._is_closed = False
        self._woken, self._wake = os.pipe()
        """Ends of a pipe: something can be read from it once the channel is closed."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
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
            why = problem.strerror if isinstance(problem, OSError) else problem
            raise SyncError(f"Trainer and engine cannot meet in {directory}: {why}.") from None

    def send(self, message: _Message) -> None:
        """Send `message`. `TransferTimeout` when nobody takes it."""
        with self._used():
            if not self._is_ready(zmq.POLLOUT, self._timeout):
                raise TransferTimeout(f"No engine connected to take weights within {self._timeout:g} s.")
            self._socket.send(msgspec.msgpack.encode(message))

    def expect(self, kind: type[_Expected], transfer: int | None = None, *, latest: bool = False) -> _Expected:
        """The next message of `kind` (of `transfer`), dropping others; a `Refused` of it is raised.

        `latest` takes the last of those that have arrived. `TransferTimeout` when none comes, whatever else does.
        """
        deadline = time.monotonic() + self._timeout
        found: _Expected | None = None
        with self._used():
            while (left := deadline - time.monotonic()) > 0 and self._is_ready(zmq.POLLIN, 0 if found else left):
                message = self._received()
                belongs = message is not None and transfer in (None, message.transfer)
                if belongs and isinstance(message, Refused):
                    raise ManifestMismatch(message.reason)
                elif belongs and isinstance(message, kind):
                    found = message
                    if not latest:
                        break
                else:
                    self.num_dropped += 1
        if found is None:
            raise TransferTimeout(f"The other side of the weight transport was silent for {self._timeout:g} s.")
        return found

    def await_device(self, wait: Callable[[float], bool]) -> None:
        """Wait, by a `SharedMemory.mark`, for the device. `TransferTimeout` when it does not come to an end."""
        if not wait(self._timeout):
            raise TransferTimeout(f"The device has not copied weights within {self._timeout:g} s.")

    def close(self) -> None:
        """Close the channel, from any thread, at once; who waits at it gets a `SyncError`. No-op the second time."""
        with self._closing:
            if not self._is_closed:
                os.write(self._wake, b"\0")  # first: once it is closed, the pipe may be gone
                self._is_closed = True
        self._close_unused()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Have the socket to oneself. Raises `SyncError` once the channel is closed."""
        try:
            with self._in_use:
                if self._is_closed:
                    raise SyncError(_CLOSED)
                yield
        finally:
            self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and self._in_use.acquire(blocking=False):
            try:
                if not self._socket.closed:
                    self._socket.close()
                    self._context.term()
                    for descriptor in (self._woken, self._wake, self._lock):
                        if descriptor >= 0:
                            os.close(descriptor)
            finally:
                self._in_use.release()

    def _is_ready(self, events: int, seconds: float) -> bool:
        """Whether the socket is, after waiting at most so long. Raises `SyncError` when the channel is closed."""
        poller = zmq.Poller()
        poller.register(self._socket, events)
        poller.register(self._woken, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(seconds * 1e3)))
        if self._woken in ready:
            raise SyncError(_CLOSED)
        return self._socket in ready

    def _received(self) -> _Message | None:
        """The next message; None for a frame that is none."""
        try:
            message: _Message = msgspec.msgpack.decode(self._socket.recv(), type=self._accepts)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return message


class HandleSender(HeldOfferSender):
    """The trainer's end, over any `SharedMemory`, to one engine. Users make an `IpcSender`."""

    def __init__(self, directory: Path, memory: SharedMemory, *, timeout: float, bucket_bytes: int) -> None:
        super().__init__()
        check_bucket_bytes(bucket_bytes)
        self.channel = Channel(directory, binds=True, accepts=_ToTrainer, timeout=timeout)
        self._memory, self._bucket_bytes = memory, bucket_bytes
        self._buffers: list[Tensor] = []

    def send(self) -> None:
        offer, manifest = self._offered()
        request = self.channel.expect(Request, latest=True)  # earlier ones are of engines that gave up
        self._check(request, manifest)
        in_place = self._in_place(offer)
        buckets = plan_buckets([spec for spec in manifest.tensors if spec.name not in in_place], self._bucket_bytes)
        self._reserve(largest_bucket(buckets))
        shared = self._shared(request.transfer, in_place)
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

    def _shared(self, transfer: int, in_place: Mapping[str, Tensor]) -> Shared:
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
        self.channel = Channel(directory, binds=False, accepts=_ToEngine, timeout=timeout)
        self._memory = memory
        self._opened: dict[MemoryHandle, Tensor] = {}

    def groups(self, manifest: WeightManifest) -> Generator[list[NamedTensor]]:
        """Yield the tensors in place, then those of each bucket, as views of the trainer's memory."""
        manifest.check()
        transfer = secrets.randbits(63)
        self.channel.send(Request(transfer, manifest.version, manifest.digest, self._memory.name))
        shared = self.channel.expect(Shared, transfer)
        check_bucket_bytes(shared.bucket_bytes)
        if len(shared.handles) < NUM_BUFFERS:
            raise SyncError(f"The trainer shares {len(shared.handles)} memories: at least {NUM_BUFFERS} are expected.")
        # Memory of earlier updates is closed, so that a trainer that has other memory now can free it.
        self._opened = {h: self._opened[h] if h in self._opened else self._memory.open(h) for h in shared.handles}
        memories = [self._opened[handle] for handle in shared.handles]
        specs, in_place = {spec.name: spec for spec in manifest.tensors}, []
        for place in shared.in_place:
            spec = specs.pop(place.name, None)
            if spec is None or place.handle not in range(len(memories)):
                raise SyncError(
                    f"The trainer shares '{place.name[:200]}', which is not in the manifest or not in its memory."
                )
            in_place.append((spec.name, _view(memories[place.handle], Slot(spec, place.start))))
        yield in_place
        pending: deque[tuple[int, Callable[[float], bool]]] = deque()  # buckets being unpacked, and what waits for that
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

    def close(self) -> None:
        self._opened = {}
        self.channel.close()

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
