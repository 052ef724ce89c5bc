"""Packed broadcast of weights over a process group: the part that `gloo` and `nccl` share.

    every rank                 rank 0                                      ranks 1 ..
    header      ────────────>  version, digest, bucket size
    agreed?     <───────────>  if one rank objects, all stop; nothing has moved
    pieces      <───────────>  which ones any rank lacks; no others travel
    bucket k    ────────────>  packed while k - 1 is under way             unpacked while k + 1 is under way
    done?       <───────────>  all have everything

Two buckets are in flight, so two buffers are enough on each side. Any error on the way ends the group for everybody: a
collective that was broken off cannot be resumed.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sync.base import GroupReceiver
from sync.buckets import (
    NUM_BUFFERS,
    Bucket,
    check_bucket_bytes,
    largest_bucket,
    piece_reader,
    plan_buckets,
    view_of,
)
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.groups import NEW_ENDS, WeightGroup
from sync.manifest import TensorSpec, WeightManifest
from sync.offer import HeldOfferSender
from sync.pieces import Lacking, piece_flags, select_flagged
from sync.source import NamedTensor
from sync.tensor_check import CheckResult
from sync.tensor_writer import HOST_WRITER, TensorWriter, WriteBatch


class BroadcastEnd:
    """One rank's group and buffers, and the steps of a transfer, each with a deadline.

    Args:
        device: of the buffers.
        stream: entered around everything that touches buffers or the group.
        settle: waits, at most the given seconds, until the work on `stream` is done; False if it is not.
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

    def agree(self, manifest: WeightManifest, bucket_bytes: int) -> None:
        """Broadcast the header and let every rank object. Raises `ManifestMismatch` on all if any does."""
        mine = torch.tensor(_header(manifest, bucket_bytes), dtype=torch.int64, device=self.device)
        root = mine.clone()
        self.finish(self.broadcast(root))
        self._wait_for_device()
        differs = not torch.equal(root, mine)
        if num_objections := self.count(differs):
            what = f"Version {manifest.version} was not sent: {num_objections} of {self.group.config.world_size} ranks"
            raise ManifestMismatch(f"{what} have another manifest (or bucket_bytes) than the trainer.")

    def count(self, flag: bool) -> int:
        """The number of ranks on which `flag` is set. Waits for every rank."""
        total = torch.tensor([int(flag)], dtype=torch.int64, device=self.device)
        self._reduce(total, dist.ReduceOp.SUM)
        return int(total.item())

    def gather_lacking(self, lacking: Lacking | None, specs: Sequence[TensorSpec]) -> Lacking:
        """The pieces that any rank lacks; `lacking`: those that this one lacks, None: all. Waits for every rank."""
        flags = torch.frombuffer(piece_flags(lacking, specs) or bytearray(1), dtype=torch.uint8).to(self.device)
        self._reduce(flags, dist.ReduceOp.MAX)
        return select_flagged(flags.tolist(), specs)

    def broadcast(self, tensor: Tensor) -> Any:
        """Start the broadcast of rank 0's `tensor` into that of every other rank; returns the work to `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._start_transfer(lambda group: group.broadcast([tensor], options))

    def finish(self, work: Any) -> None:
        """Wait on this thread until `work` is done, on a device too. Ends the group, and raises `TransferTimeout` after
        the group's timeout, counted from the start of `work`, or `SyncError` for a rank that is gone."""
        try:
            with self.group.step():
                work.wait(timedelta(seconds=self.group.config.timeout))
        except RuntimeError as problem:
            raise self._break_group(problem) from None

    def reserve(self, num_bytes: int) -> None:
        """Allocate buffers of at least `num_bytes`, unless those of the last update suffice."""
        if not self._buffers or self._buffers[0].numel() < num_bytes:
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(NUM_BUFFERS)]

    def buffer(self, k: int, bucket: Bucket) -> Tensor:
        """uint8 [bucket.num_bytes]; every second bucket has the same memory."""
        return self._buffers[k % NUM_BUFFERS][: bucket.num_bytes]

    def close(self) -> None:
        """Leave the group and free the buffers."""
        self.group.leave()
        self._buffers = []

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self.finish(self._start_transfer(lambda group: group.allreduce([tensor], options)))
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        """Wait with a deadline; reading a value on the host would wait without one."""
        if not self._settle(self.group.config.timeout):
            raise self._too_late()

    def _start_transfer(self, start: Callable[[Any], Any]) -> Any:
        group = self.group.wait_for_ranks()
        try:
            return start(group)
        except RuntimeError as problem:
            raise self._break_group(problem) from None

    def _break_group(self, problem: RuntimeError) -> SyncError:
        self.group.leave()
        text = str(problem)
        if "imed out" in text or "imeout" in text:
            return self._too_late()
        return SyncError(f"A rank of the weight group is gone. {NEW_ENDS}")

    def _too_late(self) -> TransferTimeout:
        self.group.leave()
        seconds = self.group.config.timeout
        return TransferTimeout(f"A rank of the weight group did not answer within {seconds:g} s. {NEW_ENDS}")


class BroadcastSender(HeldOfferSender):
    """The trainer's end, rank 0."""

    def __init__(self, end: BroadcastEnd, bucket_bytes: int) -> None:
        super().__init__()
        check_bucket_bytes(bucket_bytes)
        self._end, self._bucket_bytes = end, bucket_bytes
        self.ready = end.group.ready

    def send(self) -> None:
        offer, manifest = self._require_offer()
        end = self._end
        with end.stream():
            end.agree(manifest, self._bucket_bytes)
            travelling = end.gather_lacking({}, manifest.tensors)
            buckets = plan_buckets(manifest.tensors, self._bucket_bytes, travelling)
            end.reserve(largest_bucket(buckets))
            works: list[Any] = []
            for k, bucket in enumerate(buckets):
                if k >= NUM_BUFFERS:
                    end.finish(works[k - NUM_BUFFERS])
                buffer = end.buffer(k, bucket)
                offer.pack(bucket, buffer)
                works.append(end.broadcast(buffer))
            for work in works[-NUM_BUFFERS:]:
                end.finish(work)
            end.count(False)

    def close(self) -> None:
        super().close()
        self._end.close()


class BroadcastReceiver(GroupReceiver):
    """A worker's end, rank 1 or higher."""

    def __init__(self, end: BroadcastEnd, bucket_bytes: int) -> None:
        check_bucket_bytes(bucket_bytes)
        self._end, self._bucket_bytes = end, bucket_bytes
        self.ready = end.group.ready

    def groups(self, manifest: WeightManifest) -> Generator[list[NamedTensor]]:
        """Yield the tensors of each bucket while the sender sends. Not exhausted, it ends the process group."""
        for bucket, buffer in self._buckets(manifest, None):
            yield bucket.views(buffer)

    def receive_into(
        self,
        shadow: Mapping[str, Tensor],
        manifest: WeightManifest,
        writer: TensorWriter = HOST_WRITER,
        lacking: Lacking | None = None,
    ) -> dict[str, CheckResult]:
        batch = WriteBatch(writer)
        with closing(self._buckets(manifest, lacking)) as buckets:
            for bucket, buffer in buckets:
                whole: list[tuple[str, Tensor, Tensor]] = []
                for slot in bucket.slots:
                    name = slot.spec.name
                    if lacking is not None and name not in lacking:
                        continue
                    if (part := lacking[name] if lacking else None) is None:
                        whole.append((name, shadow[name], view_of(buffer, slot)))
                    else:
                        batch.read(name, shadow[name], piece_reader(buffer, slot), part)
                batch.write_group(whole)
        return batch.results()

    def _buckets(self, manifest: WeightManifest, lacking: Lacking | None) -> Generator[tuple[Bucket, Tensor]]:
        """Yield each bucket with its bytes, valid until the next one is asked for."""
        manifest.check()
        end = self._end
        with end.stream():
            end.agree(manifest, self._bucket_bytes)
            travelling = end.gather_lacking(lacking, manifest.tensors)
            buckets = plan_buckets(manifest.tensors, self._bucket_bytes, travelling)
            end.reserve(largest_bucket(buckets))
        try:
            under_way: list[Any] = []
            for k, bucket in enumerate(buckets):
                with end.stream():
                    for ahead in range(len(under_way), min(k + NUM_BUFFERS, len(buckets))):
                        under_way.append(end.broadcast(end.buffer(ahead, buckets[ahead])))
                    end.finish(under_way[k])
                yield bucket, end.buffer(k, bucket)
            with end.stream():
                end.count(False)
        except GeneratorExit:
            end.close()
            raise

    def close(self) -> None:
        self._end.close()


def _header(manifest: WeightManifest, bucket_bytes: int) -> list[int]:
    """Version, total digest in four parts, bucket size: all ranks have to agree on them."""
    parts = [int(manifest.digest[i : i + 8], 16) for i in range(0, 32, 8)]
    return [manifest.version, *parts, bucket_bytes]
