"""The two ends of a weight transport, as protocols. Each transport implements both in one file.

    sender.offer(source, version, metadata) -> manifest ──> receiver.receive(manifest) -> (name, tensor) ...

What the receiving engine does with the tensors (stage, verify, commit) is a transaction of its own, the same for every
transport.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from sync.manifest import WeightManifest

WeightSource: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Where weights come from. Tensors of an iterator must keep their values until the update has ended."""

Metadata: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape) of everything a receiver accepts."""


class WeightSender(Protocol):
    """The trainer's end."""

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """Describe `source` as the receiver will hold it and make it ready to travel.

        Floating tensors are cast to the receiver's dtype (nearest-even) before they are digested; nothing else is
        converted. Raises `ManifestMismatch` when a value is not a plain tensor.
        """

    def close(self) -> None:
        """Let go of the source."""


class WeightReceiver(Protocol):
    """The engine's end."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of `manifest` once, under its manifest name, in any order."""

    def close(self) -> None:
        """Let go of the connection."""
