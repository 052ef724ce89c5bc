"""How a tensor comes to its place: piece by piece, each digested and looked at while it is in the cache.

    for each piece:   write ──> digest of what lies there now ──> extremes of its bits
    with `copy_by`:   digest of what is to come ──> copy past the cache, largest bits

One pass over memory instead of three. A place that is not one run of the host's bytes (strided, or on a device) is
written whole and read again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from sync.manifest import tensor_bytes

_PIECE_BYTES = 256 << 10
"""Fits a core's second cache twice: where the bytes come from, and where they go."""
_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


Copy: TypeAlias = Callable[[int, int, int, int], int]
"""`copy(out, source, num_bytes, width)`: between two addresses, of elements `width` bytes wide; returns the largest of
their bits without the sign."""


class Arrival(NamedTuple):
    """What lies in a tensor's place."""

    digest: str
    """xxh3-128, as in a manifest."""
    finite: bool
    """No NaN and no infinity; True for what is not floating."""


_find_copy: Callable[[], Copy | None] | None = None


def copy_by(find: Callable[[], Copy | None] | None) -> None:
    """Have what needs no cast be copied by `find()`, in this process; by numpy where one of the two is None.

    `find` is called at each copy.
    """
    global _find_copy
    _find_copy = find


def put(out: Tensor, tensor: Tensor) -> str:
    """Write `tensor`, cast nearest-even, into `out`; the digest of what lies there then.

    Plain copies stay on the calling thread, several of which may copy.
    """
    if not (is_plain(out) and is_plain(tensor)):
        out.copy_(tensor)
        return _passed(_on_host(out), None, looks=False).digest
    return _brought(out, tensor, looks=False).digest


def take(out: Tensor, tensor: Tensor) -> Arrival:
    """As `put`, and look whether the values are finite."""
    if not (is_plain(out) and is_plain(tensor)):
        out.copy_(tensor)
        return _passed(_on_host(out), None, looks=True)
    return _brought(out, tensor, looks=True)


def read(out: Tensor, fetch: Callable[[memoryview, int], None]) -> Arrival:
    """Have `fetch(piece, start)` fill the bytes of plain `out` from byte `start` on, and say what lies there then."""
    memory = tensor_bytes(out)
    return _passed(out, lambda start, end: fetch(memory[start:end], start), looks=True)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's values are one run of bytes of the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _brought(out: Tensor, tensor: Tensor, *, looks: bool) -> Arrival:
    copy = _find_copy() if _find_copy is not None and out.dtype == tensor.dtype else None
    if copy is None:
        return _passed(out, _writer(out, tensor), looks=looks)
    return _copied(out, tensor, copy, looks=looks)


def _copied(out: Tensor, tensor: Tensor, copy: Copy, *, looks: bool) -> Arrival:
    """The digest is of the source: it brings each piece into the cache, where `copy` finds it."""
    memory, to, source, width = tensor_bytes(tensor), out.data_ptr(), tensor.data_ptr(), out.itemsize
    digest, largest = xxhash.xxh3_128(), 0
    for start in range(0, len(memory), _PIECE_BYTES):
        piece = memory[start : start + _PIECE_BYTES]
        digest.update(piece)
        largest = max(largest, copy(to + start, source + start, len(piece), width))
    finite = not (looks and out.is_floating_point()) or largest <= _largest_bits(out.dtype)
    return Arrival(digest.hexdigest(), finite)


def _writer(out: Tensor, tensor: Tensor) -> Callable[[int, int], None]:
    """Writes bytes [start, end) of `out`."""
    if out.dtype == tensor.dtype:
        to, source = np.asarray(tensor_bytes(out)), np.asarray(tensor_bytes(tensor))
        return lambda start, end: np.copyto(to[start:end], source[start:end])
    width, flat, values = out.itemsize, out.view(-1), tensor.reshape(-1)

    def cast(start: int, end: int) -> None:
        flat[start // width : end // width].copy_(values[start // width : end // width])

    return cast


def _passed(out: Tensor, write: Callable[[int, int], None] | None, *, looks: bool) -> Arrival:
    memory = tensor_bytes(out)
    digest, finite = xxhash.xxh3_128(), True
    largest = _largest_bits(out.dtype) if looks and out.is_floating_point() else None
    for start in range(0, len(memory), _PIECE_BYTES):
        end = min(start + _PIECE_BYTES, len(memory))
        if write is not None:
            write(start, end)
        piece = memory[start:end]
        digest.update(piece)
        if largest is not None:
            finite = finite and _is_finite(np.asarray(piece), out.itemsize, largest)
    return Arrival(digest.hexdigest(), finite)


def _is_finite(piece: np.ndarray, width: int, largest: int) -> bool:
    """By extremes alone: the bits of floats grow with their magnitude, and NaN and infinities lie above the largest."""
    signed = piece.view(_INTEGERS[width])
    negative = largest + (1 << (8 * width - 1))
    return bool(signed.max() <= largest and signed.view(f"u{width}").max() <= negative)


@functools.cache
def _largest_bits(dtype: torch.dtype) -> int:
    """The bits of the largest finite value."""
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    return int(largest.reshape(1).view(torch.uint8).numpy().view(_INTEGERS[dtype.itemsize])[0])
