"""The two ends of a weight transport, as protocols. Each transport implements both in one file.

    sender.offer(source, version, metadata) -> manifest ──> receiver.receive(manifest) -> (name, tensor) ...
    sender.send()                                           ... at the same time

The manifest travels by whatever control channel the two sides have. What the receiving engine does with the tensors
(stage, verify, commit) is a transaction of its own, the same for every transport: a transport delivers bytes, and the
manifest's digests prove that they are the right ones.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from os import PathLike
from typing import ClassVar, Protocol, TypeAlias

from torch import Tensor, nn

from sync.lazy_tensor import LazyTensor
from sync.manifest import Form, WeightManifest
from sync.pieces import Lacking
from sync.tensor_check import CheckResult
from sync.tensor_writer import HOST_WRITER, TensorWriter, WriteBatch

WeightSource: TypeAlias = (
    nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor | LazyTensor]] | str | PathLike[str]
)
"""Where weights come from; a path is a published store or a safetensors checkpoint directory. Tensors must keep their
values until the update has ended."""

Metadata: TypeAlias = Mapping[str, Form]
"""Name -> (dtype, shape) of everything a receiver accepts."""


class WeightSender(Protocol):
    """The trainer's end."""

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        """Describe `source` as the receiver will hold it and make it ready to travel.

        Floating tensors are cast to the receiver's dtype (nearest-even) before they are digested; nothing else is
        converted. Raises `ManifestMismatch` when a value is not a plain tensor.
        """

    def send(self) -> None:
        """Move the offered tensors to every receiver, which calls `receive` meanwhile; returns when all have it.

        Does nothing for transports whose receivers fetch by themselves. Raises `TransferTimeout` or `SyncError`.
        """

    def forget(self) -> None:
        """Move all of the next offer, also pieces that equal the last one's; no-op for transports that always do."""
        return

    def close(self) -> None:
        """Release the source and the connection."""


class WeightReceiver(Protocol):
    """The engine's end."""

    takes_part: ClassVar[bool] = False
    """Whether pieces that the receiver of `receive_into` has already are not sent."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of `manifest` once, under its manifest name, in any order.

        A tensor is valid until the next one is asked for; on a device, for work launched on the current stream by
        then. Exhaust the iterator, or `close`.
        """

    def receive_into(
        self,
        shadow: Mapping[str, Tensor],
        manifest: WeightManifest,
        writer: TensorWriter = HOST_WRITER,
        lacking: Lacking | None = None,
    ) -> dict[str, CheckResult]:
        """Write each tensor of `manifest` into `shadow` by `writer`, and return the record of each.

        `lacking`: only these tensors, or these pieces of them, need to be written; the others are not in the result.

        `shadow` has a tensor of the manifest's shape and dtype for each name, and is asked for it once, when that
        tensor has arrived, perhaps from several threads; an error that it raises ends the receiving. Faster than
        `receive`: bytes are digested as they are written, and may be fetched by several threads, or straight to their
        place. Tensors on a device are copied and digested there by the stream that is current.
        """
        batch = WriteBatch(writer)
        for name, tensor in self.receive(manifest):
            if lacking is None or name in lacking:
                batch.write(name, shadow[name], tensor, lacking[name] if lacking else None)
        return batch.results()

    def close(self) -> None:
        """Close the connection, if there is one. Returns at once; a `receive` on another thread that waits for its
        sender to come ends."""


class GroupReceiver(WeightReceiver):
    """The engine's end where several tensors arrive together: a device copies and checks a group in one pass."""

    @abstractmethod
    def groups(self, manifest: WeightManifest) -> Generator[list[tuple[str, Tensor]]]:
        """Yield the tensors of `manifest`, several at a time; a group is valid until the next one is asked for."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        with closing(self.groups(manifest)) as groups:
            for group in groups:
                yield from group

    def receive_into(
        self,
        shadow: Mapping[str, Tensor],
        manifest: WeightManifest,
        writer: TensorWriter = HOST_WRITER,
        lacking: Lacking | None = None,
    ) -> dict[str, CheckResult]:
        batch = WriteBatch(writer)
        with closing(self.groups(manifest)) as groups:
            for group in groups:
                wanted = [pair for pair in group if lacking is None or pair[0] in lacking]
                batch.write_group((name, shadow[name], tensor) for name, tensor in wanted)
        return batch.results()
