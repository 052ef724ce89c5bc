"""The offer of a sender: a source, described as the receiver will hold it."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sync.base import Metadata, WeightSender, WeightSource
from sync.buckets import Bucket, view_of
from sync.digests import tensor_bytes
from sync.errors import SyncError
from sync.lazy_tensor import FileTensor, LazyTensor, materialized
from sync.manifest import (
    TensorSpec,
    WeightManifest,
    check_forms,
    check_known,
    check_specs,
    describe_all,
    dtype_name,
    torch_dtype,
)
from sync.pieces import Part
from sync.source import SourcePair, SourceTensor, read_source, tied_groups
from sync.tensor_writer import TensorWriter, WriteBatch, Written
from sync.threads import in_threads


class Offer:
    """A source as one receiver will hold it: tied groups once, floating dtypes as the receiver wants them.

    Nothing is cast, gathered, computed or read before it is asked for, one tensor at a time. Raises `ManifestMismatch`
    for a source that no manifest can describe.
    """

    def __init__(self, source: WeightSource, metadata: Metadata) -> None:
        pairs = read_source(source)
        self.aliases = tied_groups(pairs)
        repeated = {name for group in self.aliases for name in group[1:]}
        self.tensors = [pair for pair in pairs if pair[0] not in repeated]
        self._metadata = metadata
        self.specs = [
            TensorSpec(name, tuple(tensor.shape), dtype_name(_wanted_dtype(name, tensor, metadata)), digest="")
            for name, tensor in self.tensors
        ]
        """The tensors as the receiver will hold them, without digests."""
        check_specs(self.specs, self.aliases, "The source")
        self.index = {spec.name: i for i, spec in enumerate(self.specs)}

    def cast(self, i: int) -> Tensor:
        """Tensor `i` on its own device, whole, in the receiver's dtype (nearest-even); not copied if it is so already.

        Only floating dtypes are cast: any other difference is left for the receiver to refuse.
        """
        name, tensor = self.tensors[i]
        return materialized(tensor).to(_wanted_dtype(name, tensor, self._metadata))

    def as_is(self, i: int) -> Tensor | None:
        """Tensor `i` itself, if it is whole, contiguous and in the receiver's dtype already; otherwise None."""
        tensor = self.tensors[i][1]
        if isinstance(tensor, LazyTensor) or self._is_cast(i) or not tensor.is_contiguous():
            return None
        return tensor

    def write_changed(self, i: int, out: Tensor, writer: TensorWriter, known: Written | None) -> Written:
        """Write the pieces of tensor `i`, cast, that `out` lacks, as `TensorWriter.write_changed` does."""
        return writer.write_changed(out, materialized(self.tensors[i][1]), known)

    def copy(self, i: int, out: Tensor) -> None:
        """Write tensor `i`, cast, into `out` without a digest: reading `out` takes far longer on a device."""
        out.copy_(materialized(self.tensors[i][1]))

    def pack(self, bucket: Bucket, buffer: Tensor) -> None:
        """Copy the tensors of `bucket`, or their pieces, into its bytes."""
        for slot in bucket.slots:
            i, out = self.index[slot.spec.name], view_of(buffer, slot)
            if slot.part is None:
                self.copy(i, out)
            else:
                self._copy_part(i, slot.part, out)

    def _copy_part(self, i: int, part: Part, out: Tensor) -> None:
        """Write these pieces of tensor `i`, cast, one after the other into `out`, which is flat."""
        tensor = self.tensors[i][1]
        if isinstance(tensor, FileTensor) and not self._is_cast(i):
            memory = tensor_bytes(out)
            for start, end in part.runs:
                tensor.fetch(memory[: end - start], start)
                memory = memory[end - start :]
            return
        values, first = materialized(tensor).detach().reshape(-1), 0
        for start, end in part.elements:
            out[first : first + end - start].copy_(values[start:end])
            first += end - start

    def write_batched(self, i: int, out: Tensor, batch: WriteBatch, part: Part | None = None) -> None:
        """Write tensor `i`, cast, into `out`, as part of `batch`; only pieces of it, if `part` says so."""
        name, tensor = self.tensors[i]
        if isinstance(tensor, FileTensor) and not self._is_cast(i):
            batch.read(name, out, tensor.fetch, part)
        else:
            batch.write(name, out, self.cast(i), part)

    def check(self) -> None:
        """Raise `ChecksumMismatch` if files that are read have changed since they were opened."""
        for check in {tensor.check for _, tensor in self.tensors if isinstance(tensor, LazyTensor)}:
            check()

    def manifest_in_place(self, version: int) -> WeightManifest:
        """The manifest of tensors that stay where they are; those on a device are digested there.

        Tensors that have to be gathered or computed are so now, once, and kept on the host in the receiver's dtype.
        """
        specs: dict[int, TensorSpec] = {}

        def cast_tensors() -> Iterator[tuple[str, Tensor]]:
            for i, (name, tensor) in enumerate(self.tensors):
                if isinstance(tensor, FileTensor) and not self._is_cast(i):
                    specs[i] = self._spec(i, tensor.piece_digests())
                    continue
                cast = self.cast(i)
                if isinstance(tensor, LazyTensor) and not isinstance(tensor, FileTensor):
                    self.tensors[i] = (name, cast.cpu())
                yield name, cast

        specs |= {self.index[spec.name]: spec for spec in describe_all(cast_tensors())}
        return self._manifest(version, [specs[i] for i in range(len(self.specs))])

    def manifest(self, version: int, write: Callable[[int], Sequence[bytes]], num_threads: int) -> WeightManifest:
        """The manifest; `write(i)` writes tensor `i` and returns its pieces' digests, several at once on `num_threads`
        threads."""
        if any(isinstance(tensor, LazyTensor) and tensor.is_collective for _, tensor in self.tensors):
            digests = list(map(write, range(len(self.specs))))  # gathering is collective: every rank in this order
        else:
            sizes = [spec.num_bytes for spec in self.specs]
            digests = in_threads(write, range(len(self.specs)), num_threads, sizes)
        return self._manifest(version, list(map(self._spec, range(len(digests)), digests)))

    def _spec(self, i: int, digests: Sequence[bytes]) -> TensorSpec:
        spec = self.specs[i]
        return TensorSpec.of_pieces(spec.name, spec.shape, spec.dtype, digests)

    def _manifest(self, version: int, specs: Sequence[TensorSpec]) -> WeightManifest:
        self.check()
        return WeightManifest.of(version, specs, self.aliases)

    def _is_cast(self, i: int) -> bool:
        return dtype_name(self.tensors[i][1].dtype) != self.specs[i].dtype


def check_source(pairs: Sequence[SourcePair], metadata: Metadata) -> None:
    """Raise `ManifestMismatch` unless `metadata`, which is everything that an engine has, has these names and shapes.

    Done before anything is read, gathered or cast: a source is never larger than the engine's weights.
    """
    check_known((name for name, _ in pairs), metadata)
    forms = ((n, (dtype_name(_wanted_dtype(n, tensor, metadata)), tuple(tensor.shape))) for n, tensor in pairs)
    check_forms(forms, metadata)


class HeldOfferSender(WeightSender):
    """Base of senders that read the source a second time, in `send` or while it is received.

    It holds references to the source's tensors, and copies of gathered ones, until `close`.
    """

    def __init__(self) -> None:
        self._held: tuple[Offer, WeightManifest] | None = None

    def offer(self, source: WeightSource, version: int, metadata: Metadata) -> WeightManifest:
        offer = Offer(source, metadata)
        manifest = offer.manifest_in_place(version)
        self._held = offer, manifest
        return manifest

    def close(self) -> None:
        self._held = None

    def _require_offer(self) -> tuple[Offer, WeightManifest]:
        if self._held is None:
            raise SyncError("Nothing is on offer: call offer first; once closed, make another sender.")
        return self._held


def _wanted_dtype(name: str, tensor: SourceTensor, metadata: Metadata) -> torch.dtype:
    wanted = torch_dtype(metadata[name][0]) if name in metadata else tensor.dtype
    return wanted if wanted.is_floating_point and tensor.dtype.is_floating_point else tensor.dtype
