"""The gloo transport: a collective between CPUs, on one machine or several.

Its group is its own: it neither needs nor disturbs the trainer's default group. With a file rendezvous every connection
is on the loopback interface; otherwise on the one that leads to the rendezvous.
"""

import ctypes
from collections.abc import Callable
from datetime import timedelta

import torch

from sync.broadcast import BroadcastEnd, BroadcastReceiver, BroadcastSender
from sync.groups import GroupConfig, ProcessGroup, Store, WeightGroup, Work, c10d, own_address

_NEVER_SECONDS = 1e6
_LOOK_SECONDS = 0.2
BUCKET_BYTES = 16 << 20
"""Default size of a bucket. A larger tensor travels alone."""


class GlooSender(BroadcastSender):
    """The trainer's end: rank 0 of `world_size`. Returns at once; the group forms in the background.

    Args:
        rendezvous: "file:///path", a new one for each group; or "tcp://host:port" across machines.
        timeout: seconds for the group to form, and for each step of a transfer.
        bucket_bytes: how much travels at once; the same on every rank.
    """

    def __init__(
        self, rendezvous: str, world_size: int, *, timeout: float = 300.0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(_end(GroupConfig(rendezvous, 0, world_size, timeout)), bucket_bytes)


class GlooReceiver(BroadcastReceiver):
    """A worker's end: rank 1 to `world_size` - 1. Arguments as for `GlooSender`."""

    takes_part = True

    def __init__(
        self, rendezvous: str, rank: int, world_size: int, *, timeout: float = 300.0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(_end(GroupConfig(rendezvous, rank, world_size, timeout)), bucket_bytes)


def _end(config: GroupConfig) -> BroadcastEnd:
    return BroadcastEnd(WeightGroup(config, connect_gloo), torch.device("cpu"))


def connect_patient(store: Store, config: GroupConfig) -> ProcessGroup:
    """A group over gloo whose steps wait for peers until their connections break."""
    return connect_gloo(store, config, step_seconds=_NEVER_SECONDS)


def run_patiently(group: WeightGroup, launch: Callable[[ProcessGroup], Work]) -> None:
    """Run a step of a patient group, until this rank leaves the group, which does not end the step.

    Raises `SyncError` if the group is not there, and `RuntimeError` if the step fails, or is left.
    """
    backend = group.wait_for_ranks()
    work = launch(backend)
    while True:
        try:
            work.wait(timedelta(seconds=_LOOK_SECONDS))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises the step's own error: it may as well have ended right behind the time to look
                return
            if group.has_left:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # never freed: that would wait for the step's end
                raise RuntimeError("this rank has left a step that its peers did not end") from None


def connect_gloo(store: Store, config: GroupConfig, *, step_seconds: float | None = None) -> ProcessGroup:
    """A group over gloo. `step_seconds`: how long a step may take; None: as long as the group may take to form."""
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=config.timeout if step_seconds is None else step_seconds)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address(config))]
    return c10d.ProcessGroupGloo(c10d.PrefixStore("weights", store), config.rank, config.world_size, options)
