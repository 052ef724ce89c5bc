"""The two ends of a weight transport, as protocols. Each transport implements both in one file.

    sender.offer(source, version, metadata) -> manifest ──> receiver.receive(manifest) -> (name, tensor) ...
    sender.send()                                           ... at the same time

The manifest travels by whatever control channel the two sides have. What the receiving engine does with the tensors
(stage, verify, commit) is a transaction of its own, the same for every transport: a transport delivers bytes, the
manifest's digests prove them.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from os import PathLike
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from sync.arrival import Arrivals
from sync.looks import Arrival
from sync.manifest import WeightManifest

WeightSource: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | PathLike[str]
"""Where weights come from; a path is a published store or a safetensors checkpoint directory. Tensors must keep their
values until the update has ended."""

Metadata: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape) of everything a receiver accepts."""


class WeightSender(Protocol):
    """The trainer's end."""

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """Describe `source` as the receiver will hold it and make it ready to travel.

        Floating tensors are cast to the receiver's dtype (nearest-even) before they are digested; nothing else is
        converted. Raises `ManifestMismatch` when a value is not a plain tensor.
        """

    def send(self) -> None:
        """Move what was offered to every receiver, which calls `receive` meanwhile; returns when all have it.

        Returns at once for transports whose receivers fetch by themselves. Raises `TransferTimeout` or `SyncError`.
        """

    def close(self) -> None:
        """Let go of the source and of the connection."""


class WeightReceiver(Protocol):
    """The engine's end."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of `manifest` once, under its manifest name, in any order.

        A tensor is valid until the next one is asked for; on a device, for what was launched on the current stream by
        then. Exhaust the iterator, or `close`.
        """

    def receive_into(self, shadow: Mapping[str, Tensor], manifest: WeightManifest) -> dict[str, Arrival]:
        """Write each tensor of `manifest` into `shadow`, and return name -> what lies there then.

        `shadow` has a tensor of the manifest's shape and dtype for each name, and is asked for it once, when that
        tensor has come, perhaps from several threads; what it raises ends the receiving. Faster than `receive`: bytes
        are digested as they are written, and may be fetched several at once, or straight to their place. What is on a
        device is copied and digested there by the stream that is current.
        """
        arrivals = Arrivals()
        for name, tensor in self.receive(manifest):
            arrivals.take(name, shadow[name], tensor)
        return arrivals.told()

    def close(self) -> None:
        """Let go of the connection. Returns at once; a `receive` on another thread that waits for its sender to come
        ends."""


class GroupReceiver(WeightReceiver):
    """The engine's end where tensors come several at a time: a device takes those of a group in one pass."""

    @abstractmethod
    def groups(self, manifest: WeightManifest) -> Generator[list[tuple[str, Tensor]]]:
        """As `receive`; the tensors of a group are valid until the next group is asked for."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """As `WeightReceiver.receive`."""
        with closing(self.groups(manifest)) as groups:
            for group in groups:
                yield from group

    def receive_into(self, shadow: Mapping[str, Tensor], manifest: WeightManifest) -> dict[str, Arrival]:
        """As `WeightReceiver.receive_into`."""
        arrivals = Arrivals()
        with closing(self.groups(manifest)) as groups:
            for group in groups:
                arrivals.take_together((name, shadow[name], tensor) for name, tensor in group)
        return arrivals.told()
