"""How a tensor comes to its place: piece by piece, each digested and looked at while it is in the cache.

    for each piece:   write ──> digest of what lies there now ──> extremes of its bits
    with `copy_by`:   digest of what is to come ──> copy past the cache, largest bits

One pass over memory instead of three. A place that is not one run of the host's bytes (strided, or on a device) is
written whole and read again; or, where there is a `Crossing` to it, its bytes are digested on this side of it:

    for each piece:   write here ──> digest ──> extremes of its bits ──> to its place, while the next is written
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sync.digests import Digest, tensor_bytes, tensor_digest

_PIECE_BYTES = 512 << 10
"""Stays in a core's second cache between the digest and the copy that goes past it; a smaller one costs more calls."""
_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


Copy: TypeAlias = Callable[[int, int, int, int], int]
"""`copy(out, source, num_bytes, width)`: between two addresses, of elements `width` bytes wide; returns the largest of
their bits without the sign."""


class Arrival(NamedTuple):
    """What lies in a tensor's place."""

    digest: str
    """As in a manifest."""
    finite: bool
    """No NaN and no infinity; True for what is not floating."""


class Crossing(Protocol):
    """The way between the host and places that it cannot write itself. Several threads may use it."""

    def bring(self, out: Tensor, fill: Callable[[memoryview, int], None]) -> None:
        """Have `fill(piece, start)` write the row-major bytes of `out` from byte `start` on, whole elements, in order.

        They may still be under way when this returns.
        """

    def copy(self, out: Tensor, tensor: Tensor) -> None:
        """Write `tensor`, which is on the other side too, cast nearest-even, into `out`. As `bring`."""

    def fetch(self, place: Tensor) -> Iterator[memoryview]:
        """The row-major bytes of `place` in order, after what was on its way there; a piece is valid until the next."""
        ...


_find_copy: Callable[[], Copy | None] | None = None
_find_crossing: Callable[[Tensor], Crossing | None] | None = None


def copy_by(find: Callable[[], Copy | None] | None) -> None:
    """Have what needs no cast be copied by `find()`, in this process; by numpy where one of the two is None.

    `find` is called at each copy.
    """
    global _find_copy
    _find_copy = find


def cross_by(find: Callable[[Tensor], Crossing | None] | None) -> None:
    """Have what is not one run of the host's bytes be written and read by `find(place)`, in this process."""
    global _find_crossing
    _find_crossing = find


def put(out: Tensor, tensor: Tensor) -> str:
    """Write `tensor`, cast nearest-even, into `out`; the digest of what lies there then.

    Plain copies stay on the calling thread, several of which may copy.
    """
    return _written(out, tensor, looks=False).digest


def take(out: Tensor, tensor: Tensor) -> Arrival:
    """As `put`, and look whether the values are finite."""
    return _written(out, tensor, looks=True)


def read(out: Tensor, fetch: Callable[[memoryview, int], None]) -> Arrival:
    """Have `fetch(piece, start)` fill the bytes of `out` from byte `start` on, and say what lies there then."""
    look = _Look(out.dtype, looks=True)

    def fill(memory: memoryview, at: int) -> None:
        look.over(memory, lambda start, end: fetch(memory[start:end], at + start))

    if is_plain(out):
        fill(tensor_bytes(out), 0)
    elif (crossing := _crossing_to(out)) is not None:
        crossing.bring(out, fill)
    else:
        here = torch.empty(out.shape, dtype=out.dtype)
        fetch(tensor_bytes(here), 0)
        return take(out, here)
    return look.arrival


def digest(place: Tensor) -> str:
    """Of what lies in a place, as in a manifest."""
    crossing = None if is_plain(place) else _crossing_to(place)
    if crossing is None:
        return tensor_digest(place)
    look = _Look(place.dtype, looks=False)
    for piece in crossing.fetch(place):
        look.over(piece)
    return look.arrival.digest


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's values are one run of bytes of the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _crossing_to(place: Tensor) -> Crossing | None:
    return None if _find_crossing is None else _find_crossing(place)


def _written(out: Tensor, tensor: Tensor, *, looks: bool) -> Arrival:
    if is_plain(out) and is_plain(tensor):
        return _brought(out, tensor, looks=looks)
    crossing = None if is_plain(out) else _crossing_to(out)
    if crossing is not None:
        return _crossed(out, tensor, crossing, looks=looks)
    out.copy_(tensor)
    return _passed(out.detach().cpu().contiguous(), None, looks=looks)


def _crossed(out: Tensor, tensor: Tensor, crossing: Crossing, *, looks: bool) -> Arrival:
    look = _Look(out.dtype, looks=looks)
    if not is_plain(tensor) and _crossing_to(tensor) is crossing:
        crossing.copy(out, tensor)
        for piece in crossing.fetch(out):
            look.over(piece)
        return look.arrival
    values = tensor.detach().cpu().reshape(-1)

    def fill(memory: memoryview, at: int) -> None:
        here = torch.frombuffer(memory, dtype=out.dtype)
        first = at // out.itemsize
        look.over(memory, _writer(here, values[first : first + len(here)]))

    crossing.bring(out, fill)
    return look.arrival


def _brought(out: Tensor, tensor: Tensor, *, looks: bool) -> Arrival:
    copy = _find_copy() if _find_copy is not None and out.dtype == tensor.dtype else None
    if copy is None:
        return _passed(out, _writer(out, tensor), looks=looks)
    return _copied(out, tensor, copy, looks=looks)


def _copied(out: Tensor, tensor: Tensor, copy: Copy, *, looks: bool) -> Arrival:
    """The digest is of the source: it brings each piece into the cache, where `copy` finds it."""
    memory, to, source, width = tensor_bytes(tensor), out.data_ptr(), tensor.data_ptr(), out.itemsize
    digest, largest = Digest(), 0
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
    look = _Look(out.dtype, looks=looks)
    look.over(tensor_bytes(out), write)
    return look.arrival


class _Look:
    """What is known of bytes that have passed, in order."""

    def __init__(self, dtype: torch.dtype, *, looks: bool) -> None:
        self._digest, self._finite, self._width = Digest(), True, dtype.itemsize
        self._largest = _largest_bits(dtype) if looks and dtype.is_floating_point else None

    def over(self, memory: memoryview, write: Callable[[int, int], None] | None = None) -> None:
        """`memory` follows; `write(start, end)` first fills it from start to end, piece by piece."""
        for start in range(0, len(memory), _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, len(memory))
            if write is not None:
                write(start, end)
            piece = memory[start:end]
            self._digest.update(piece)
            if self._largest is not None:
                self._finite = self._finite and _is_finite(np.asarray(piece), self._width, self._largest)

    @property
    def arrival(self) -> Arrival:
        return Arrival(self._digest.hexdigest(), self._finite)


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
