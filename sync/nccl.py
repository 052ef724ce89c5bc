"""The nccl transport: a broadcast between CUDA devices, packed, two buckets in flight, on a stream of its own.

**Unproven**: its device part has not run yet. The protocol and the packing are those of `sync.broadcast`, proven over
gloo; only the group, the stream and the deadline on the device are here. That a deadline raises and ends no process is
how torch 2.13 reads; tests prove what its constructor is given, and the order of streams on a fake device.

NCCL opens sockets on the interfaces that NCCL_SOCKET_IFNAME allows: set it to "lo" on one machine.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from sync.broadcast import BroadcastEnd, BroadcastReceiver, BroadcastSender
from sync.devices import cuda_device, is_done_within
from sync.groups import GroupConfig, ProcessGroup, Store, WeightGroup, c10d

BUCKET_BYTES = 256 << 20
"""Default size of a bucket; each side has two on its device. A larger tensor travels alone."""
_cuda: Any = torch.cuda
_NEVER_SECONDS = 30 * 86_400.0
"""A deadline that no step reaches."""
_CONSTRUCTING = threading.Lock()
"""Held while the environment is changed for a constructor."""


class NcclSender(BroadcastSender):
    """The trainer's end: rank 0 of `world_size`. Unproven (see the module). Returns at once.

    Args:
        device: the device of the buckets; the source may be anywhere.
        rendezvous, timeout, bucket_bytes: as for `GlooSender`.

    Raises `SyncError` for a device that is not CUDA, or if torch has no NCCL.
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
        super().__init__(_end(GroupConfig(rendezvous, 0, world_size, timeout), device), bucket_bytes)


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
        super().__init__(_end(GroupConfig(rendezvous, rank, world_size, timeout), device), bucket_bytes)


def _end(config: GroupConfig, device_name: str) -> BroadcastEnd:
    device = cuda_device("nccl", device_name)
    config.check()
    stream = _cuda.Stream(device)

    @contextlib.contextmanager
    def on_stream() -> Iterator[None]:
        """Run after the work that the caller has launched; the caller's later work runs after this."""
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(device).wait_stream(stream)

    def settle(seconds: float) -> bool:
        done = _cuda.Event()
        done.record(stream)
        return is_done_within(done, seconds)

    def connect(store: Store, config: GroupConfig) -> ProcessGroup:
        """Waits raise errors and deadlines on the thread that waits.

        Otherwise torch's watchdog thread would end this process, trainer or engine, a minute after a late step, even
        one that was aborted.
        """
        return _connect_group(store, config, device, config.timeout, {"TORCH_NCCL_BLOCKING_WAIT": "1"})

    return BroadcastEnd(WeightGroup(config, connect), device, stream=on_stream, settle=settle)


def connect_ahead(store: Store, config: GroupConfig, *, device: torch.device) -> ProcessGroup:
    """A group whose steps are launched like kernels: later work on the device waits for them, the host does not.

    torch's watchdog ends no process that has it: its owner notices how the others end, and aborts it.
    """
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    return _connect_group(store, config, device, _NEVER_SECONDS, variables)


def _connect_group(
    store: Store, config: GroupConfig, device: torch.device, seconds: float, variables: dict[str, str]
) -> ProcessGroup:
    """A group with this deadline for each step, made with these variables in the environment."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    prefixed = c10d.PrefixStore("weights", store)
    with _environment(variables):
        group = c10d.ProcessGroupNCCL(prefixed, config.rank, config.world_size, options)
    group.eager_connect_single_device(device)  # otherwise the first step would: a group that has formed is ready
    return group


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Have these variables in the environment inside. torch reads them in a group's constructor, for it alone."""
    with _CONSTRUCTING:
        former = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in former.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
