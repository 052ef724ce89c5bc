"""The gloo transport: a collective between CPUs, on one machine or several.

Its group is its own: it neither needs nor disturbs the trainer's default group. With a file rendezvous every connection
is on the loopback interface; otherwise on the one that leads to the rendezvous.
"""

from datetime import timedelta

import torch

from sync.broadcast import BroadcastEnd, BroadcastReceiver, BroadcastSender
from sync.groups import GroupConfig, ProcessGroup, Store, WeightGroup, c10d, own_address

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


def connect_gloo(store: Store, config: GroupConfig) -> ProcessGroup:
    """A group over gloo."""
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=config.timeout)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address(config))]
    return c10d.ProcessGroupGloo(c10d.PrefixStore("weights", store), config.rank, config.world_size, options)
