"""Packed broadcast of weights over a process group: what `gloo` and `nccl` have in common.

    every rank                 rank 0                                      ranks 1 ..
    header      ────────────>  version, digest, bucket size
    agreed?     <───────────>  one says no: all stop, nothing has moved
    bucket k    ────────────>  packed while k - 1 is under way             taken out while k + 1 is under way
    done?       <───────────>  all have everything

Two buckets are in flight, so two buffers are enough on each side. Any error on the way ends the group for everybody:
half a collective cannot be taken up again.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sync.base import GroupReceiver, Metadata, WeightSource
from sync.buckets import Bucket, plan_buckets, view_of
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.groups import WeightGroup
from sync.manifest import WeightManifest
from sync.offer import HeldOffer
from sync.source import NamedTensor

_IN_FLIGHT = 2


class BroadcastEnd:
    """Either end: the group, the buffers, and steps with deadlines.

    Args:
        device: of the buffers.
        stream: entered around everything that touches buffers or the group.
        settle: waits, at most the given seconds, until what was started on `stream` is done; False if it is not.
    """

    def __init__(
        self,
        group: WeightGroup,
        device: torch.device,
        *,
        stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
        settle: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        self.group = group
        self.device, self.stream, self._settle = device, stream, settle
        self._buffers: list[Tensor] = []

    @property
    def is_root(self) -> bool:
        """Whether this is the trainer's end."""
        return self.group.place.rank == 0

    def agree(self, manifest: WeightManifest, bucket_bytes: int) -> None:
        """Broadcast the header and let every rank object. Raises `ManifestMismatch` on all if any does."""
        mine = torch.tensor(_header(manifest, bucket_bytes), dtype=torch.int64, device=self.device)
        root = mine.clone()
        self.finish(self.broadcast(root))
        self._wait_for_device()
        differs = not torch.equal(root, mine)
        if num_objections := self.count(differs):
            what = f"Version {manifest.version} was not sent: {num_objections} of {self.group.place.world_size} ranks"
            raise ManifestMismatch(f"{what} have another manifest (or bucket_bytes) than the trainer.")

    def count(self, flag: bool) -> int:
        """On how many ranks `flag` is set; waits for every rank."""
        total = torch.tensor([int(flag)], dtype=torch.int64, device=self.device)
        self.finish(self._started(lambda group: group.allreduce([total], dist.AllreduceOptions())))
        self._wait_for_device()
        return int(total.item())

    def broadcast(self, tensor: Tensor) -> Any:
        """Start sending `tensor` from rank 0 into everybody's; returns the work to `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._started(lambda group: group.broadcast([tensor], options))

    def finish(self, work: Any) -> None:
        """Wait for `work`. On a device only `stream` waits for it; the deadline is then that of the next `count`."""
        try:
            with self.group.step():
                work.wait(timedelta(seconds=self.group.place.timeout))
        except RuntimeError as problem:
            raise self._broken(problem) from None

    def buffer(self, k: int, bucket: Bucket, largest: int) -> Tensor:
        """uint8 [bucket.num_bytes], the same memory for every second bucket, kept from update to update."""
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(_IN_FLIGHT)]
        return self._buffers[k % _IN_FLIGHT][: bucket.num_bytes]

    def close(self) -> None:
        """Leave the group and free the buffers."""
        self.group.leave()
        self._buffers = []

    def _wait_for_device(self) -> None:
        """Before a value is read on the host, which would wait without a deadline."""
        if not self._settle(self.group.place.timeout):
            raise self._too_late()

    def _started(self, start: Callable[[Any], Any]) -> Any:
        group = self.group.joined()
        try:
            return start(group)
        except RuntimeError as problem:
            raise self._broken(problem) from None

    def _broken(self, problem: RuntimeError) -> SyncError:
        self.group.leave()
        text = str(problem)
        if "imed out" in text or "imeout" in text:
            return self._too_late()
        return SyncError("A member of the weight group has gone: make new ends with a new rendezvous.")

    def _too_late(self) -> TransferTimeout:
        self.group.leave()
        seconds = self.group.place.timeout
        return TransferTimeout(f"A member of the weight group did not answer within {seconds:g} s: make new ends.")


class BroadcastSender:
    """The trainer's end, rank 0."""

    def __init__(self, end: BroadcastEnd, bucket_bytes: int) -> None:
        _check_bucket_bytes(bucket_bytes)
        self._end, self._bucket_bytes = end, bucket_bytes
        self._held = HeldOffer()

    def ready(self) -> bool:
        """Whether every worker has joined the group. `TransferTimeout` once it is clear that they will not."""
        return self._end.group.ready()

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """As `WeightSender.offer`. Holds references to the source's tensors, and copies of gathered ones."""
        return self._held.make(source, version, metadata)

    def send(self) -> None:
        """As `WeightSender.send`."""
        offer, manifest = self._held.get()
        end, buckets = self._end, plan_buckets(manifest.tensors, self._bucket_bytes)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        with end.stream():
            end.agree(manifest, self._bucket_bytes)
            works: list[Any] = []
            for k, bucket in enumerate(buckets):
                if k >= _IN_FLIGHT:
                    end.finish(works[k - _IN_FLIGHT])
                buffer = end.buffer(k, bucket, largest)
                for slot in bucket.slots:
                    offer.place(offer.index[slot.spec.name], view_of(buffer, slot))
                works.append(end.broadcast(buffer))
            for work in works[-_IN_FLIGHT:]:
                end.finish(work)
            end.count(False)

    def close(self) -> None:
        """Drop the source and leave the group."""
        self._held.drop()
        self._end.close()


class BroadcastReceiver(GroupReceiver):
    """A worker's end, rank 1 or higher."""

    def __init__(self, end: BroadcastEnd, bucket_bytes: int) -> None:
        _check_bucket_bytes(bucket_bytes)
        self._end, self._bucket_bytes = end, bucket_bytes

    def ready(self) -> bool:
        """As `BroadcastSender.ready`."""
        return self._end.group.ready()

    def groups(self, manifest: WeightManifest) -> Generator[list[NamedTensor]]:
        """As `GroupReceiver.groups`, while the sender sends. Not exhausted, it ends the group of ranks."""
        manifest.check()
        end, buckets = self._end, plan_buckets(manifest.tensors, self._bucket_bytes)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        with end.stream():
            end.agree(manifest, self._bucket_bytes)
        try:
            under_way: list[Any] = []
            for k, bucket in enumerate(buckets):
                with end.stream():
                    for ahead in range(len(under_way), min(k + _IN_FLIGHT, len(buckets))):
                        under_way.append(end.broadcast(end.buffer(ahead, buckets[ahead], largest)))
                    end.finish(under_way[k])
                    buffer = end.buffer(k, bucket, largest)
                yield [(slot.spec.name, view_of(buffer, slot)) for slot in bucket.slots]
            with end.stream():
                end.count(False)
        except GeneratorExit:
            end.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        self._end.close()


def _header(manifest: WeightManifest, bucket_bytes: int) -> list[int]:
    """Version, total digest in four parts, bucket size: what all ranks have to agree on."""
    parts = [int(manifest.digest[i : i + 8], 16) for i in range(0, 32, 8)]
    return [manifest.version, *parts, bucket_bytes]


def _check_bucket_bytes(bucket_bytes: int) -> None:
    if type(bucket_bytes) is not int or not 1 <= bucket_bytes <= 2**40:
        raise SyncError(f"bucket_bytes={bucket_bytes!r} is not allowed: must be an int in [1, 2**40].")
