"""Which pieces of which tensors a receiver lacks: those to send if the rest is there already."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import xxhash
from torch import Tensor

from sync.digests import PIECE_BYTES, digest_of, tensor_bytes
from sync.finite import is_finite, largest_bits
from sync.manifest import TensorSpec, torch_dtype
from sync.tensor_check import CheckResult


class Part(NamedTuple):
    """Some pieces of a tensor, if the receiver has the others."""

    spec: TensorSpec
    """With the digest of every piece."""
    indices: Sequence[int]
    """Ascending."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Bytes [start, end) of every piece, in the contiguous tensor."""
        num_bytes = self.spec.num_bytes
        return [(i * PIECE_BYTES, min((i + 1) * PIECE_BYTES, num_bytes)) for i in self.indices]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The `ranges` with neighbours joined."""
        joined: list[tuple[int, int]] = []
        for start, end in self.ranges:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        return joined

    @property
    def elements(self) -> list[tuple[int, int]]:
        """Elements [start, end) of every run, in the contiguous tensor."""
        width = torch_dtype(self.spec.dtype).itemsize
        return [(start // width, end // width) for start, end in self.runs]

    @property
    def num_bytes(self) -> int:
        """Bytes of these pieces."""
        return sum(end - start for start, end in self.ranges)


Lacking: TypeAlias = Mapping[str, Part | None]
"""The tensors that a receiver lacks, by name: some pieces of one, or all of it (None)."""


def num_bytes_lacking(lacking: Lacking, specs: Mapping[str, TensorSpec]) -> int:
    """Bytes that have to travel."""
    return sum(specs[name].num_bytes if part is None else part.num_bytes for name, part in lacking.items())


def changed_part(known: TensorSpec | None, spec: TensorSpec) -> Part | None:
    """The pieces of `spec` that a tensor of `known` lacks. None: all, also if pieces are not known."""
    if known is None or (known.dtype, known.shape) != (spec.dtype, spec.shape):
        return None
    if known.digest == spec.digest:
        return Part(spec, ())
    before, now = known.piece_digests, spec.piece_digests
    if len(before) != len(now):  # known of one only
        return None
    indices = [i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    return Part(spec, indices) if len(indices) < len(now) else None


def piece_flags(lacking: Lacking | None, specs: Sequence[TensorSpec]) -> bytearray:
    """One byte for each piece of each tensor, in order: 1 if it is lacking. `lacking=None`: all are."""
    flags = bytearray()
    for spec in specs:
        count = _num_pieces(spec)
        part = None if lacking is None else lacking.get(spec.name, Part(spec, ()))
        if part is None:
            flags += b"\1" * count
            continue
        here = bytearray(count)
        for i in part.indices:
            here[i] = 1
        flags += here
    return flags


def select_flagged(flags: Sequence[int], specs: Sequence[TensorSpec]) -> Lacking:
    """The lacking pieces that `piece_flags` name."""
    lacking: dict[str, Part | None] = {}
    first = 0
    for spec in specs:
        count = _num_pieces(spec)
        indices = [i for i in range(count) if flags[first + i]]
        first += count
        if indices:
            lacking[spec.name] = Part(spec, indices) if len(indices) < count else None
    return lacking


def _num_pieces(spec: TensorSpec) -> int:
    """At least one, so that a tensor without elements can be lacking too."""
    return max(1, -(-spec.num_bytes // PIECE_BYTES))


class PartCheck:
    """Checks pieces of a tensor as they arrive. The digest is the manifest's if each piece has its own."""

    def __init__(self, part: Part) -> None:
        self._digests = [bytes.fromhex(digest) for digest in part.spec.piece_digests]
        self._dtype, self._finite = torch_dtype(part.spec.dtype), True

    def add(self, start: int, piece: memoryview) -> None:
        """Check the piece that begins at byte `start`."""
        self.add_digest(start, piece)
        self._finite = self._finite and is_finite(piece, self._dtype)

    def add_digest(self, start: int, piece: memoryview) -> None:
        """Check its digest only."""
        self._digests[start // PIECE_BYTES] = xxhash.xxh3_128_digest(piece)

    def add_bits(self, largest: int) -> None:
        """Check that a piece is finite by the largest of its elements' bits without the sign."""
        self._finite = self._finite and (not self._dtype.is_floating_point or largest <= largest_bits(self._dtype))

    @property
    def result(self) -> CheckResult:
        """The digest of the whole tensor, and whether these pieces are finite."""
        return CheckResult(digest_of(self._digests), self._finite)


def described(part: Part, tensor: Tensor) -> TensorSpec:
    """The spec of a tensor, of which only the pieces of `part` are read: the others are as in its spec."""
    check, memory = PartCheck(part), tensor_bytes(tensor.detach())
    for start, end in part.ranges:
        check.add(start, memory[start:end])
    return msgspec.structs.replace(part.spec, digest=check.result.digest)


def sections(out: Tensor, start: int, end: int) -> Iterator[tuple[Tensor, int, int]]:
    """Elements [start, end) of a tensor, row-major, as (view, its first element, the one after its last)."""
    if start >= end:
        return
    if out.dim() == 0 or (start, end) == (0, out.numel()):
        yield out, start, end
        return
    size = out[0].numel()
    first, last = -(-start // size), end // size
    if first > last:  # all in one row
        yield from _split_shifted(out[last], last * size, start, end)
        return
    if start < first * size:
        yield from _split_shifted(out[first - 1], (first - 1) * size, start, first * size)
    if first < last:
        yield out[first:last], first * size, last * size
    if last * size < end:
        yield from _split_shifted(out[last], last * size, last * size, end)


def _split_shifted(row: Tensor, origin: int, start: int, end: int) -> Iterator[tuple[Tensor, int, int]]:
    for view, low, high in sections(row, start - origin, end - origin):
        yield view, low + origin, high + origin
