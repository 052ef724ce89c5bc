"""The nccl transport: a broadcast between CUDA devices, packed, two buckets in flight, on a stream of its own.

**Unproven**: its device part has not run yet. The protocol and the packing are those of `sync.broadcast`, proven over
gloo; what is only here is the group, the stream and the deadline on the device.

NCCL opens sockets on the interfaces that NCCL_SOCKET_IFNAME allows: set it to "lo" on one machine.
"""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from sync.broadcast import BroadcastEnd, BroadcastReceiver, BroadcastSender
from sync.devices import cuda_device
from sync.groups import Place, ProcessGroup, Store, WeightGroup, c10d

BUCKET_BYTES = 256 << 20
"""Default size of a bucket; each side has two on its device. A larger tensor travels alone."""
_POLL_SECONDS = 0.0005
_cuda: Any = torch.cuda


class NcclSender(BroadcastSender):
    """The trainer's end: rank 0 of `world_size`. Unproven (see the module). Returns at once.

    Args:
        rendezvous: "file:///path", a new one for each group; or "tcp://host:port" across machines.
        device: where the buckets are; the source may be anywhere.
        timeout: seconds for the group to form, and for each step of a transfer.
        bucket_bytes: how much travels at once; the same on every rank.

    Raises `SyncError` for a device that is not CUDA, or where torch has no NCCL.
    """

    def __init__(
        self,
        rendezvous: str,
        world_size: int,
        *,
        device: str = "cuda",
        timeout: float = 300.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(_end(Place(rendezvous, 0, world_size, timeout), device), bucket_bytes)


class NcclReceiver(BroadcastReceiver):
    """A worker's end: rank 1 to `world_size` - 1, each on a device of its own. Arguments as for `NcclSender`.

    Unproven (see the module). Tensors are on `device`, ready for the stream that is current when they are asked for.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        world_size: int,
        *,
        device: str = "cuda",
        timeout: float = 300.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(_end(Place(rendezvous, rank, world_size, timeout), device), bucket_bytes)


def _end(place: Place, device_name: str) -> BroadcastEnd:
    device = cuda_device("nccl", device_name)
    place.check()
    stream = _cuda.Stream(device)

    @contextlib.contextmanager
    def on_stream() -> Iterator[None]:
        """What the caller has started comes first, and the caller goes on after what was started in here."""
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(device).wait_stream(stream)

    def settle(seconds: float) -> bool:
        done = _cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def connect(store: Store, place: Place) -> ProcessGroup:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.timeout)
        prefixed = c10d.PrefixStore("weights", store)
        group = c10d.ProcessGroupNCCL(prefixed, place.rank, place.world_size, options)
        group.eager_connect_single_device(device)  # otherwise the first broadcast would: `ready` must mean ready
        return group

    return BroadcastEnd(WeightGroup(place, connect), device, stream=on_stream, settle=settle)
