"""How a tensor comes to its place: piece by piece, each digested and looked at while it is in the cache.

    for each piece:   write ──> digest of what lies there now ──> extremes of its bits
    with `copy_by`:   digest of what is to come ──> copy past the cache, largest bits

One pass over memory instead of three. A strided place of the host is written whole and read again. What comes to a
device from the host is digested on this side of the `Crossing` to it, where there is one:

    for each piece:   write here ──> digest ──> extremes of its bits ──> to its place, while the next is written

What was on a device already is copied there, cast nearest-even, and looked at in its place.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sync.digests import PIECE_BYTES, Digest, tensor_bytes
from sync.errors import ManifestMismatch
from sync.finite import largest_bits
from sync.looks import Arrival, Look, Looks, sees

Copy: TypeAlias = Callable[[int, int, int, int], int]
"""`copy(out, source, num_bytes, width)`: between two addresses, of elements `width` bytes wide; returns the largest of
their bits without the sign."""


class Crossing(Protocol):
    """The way from the host to places that it cannot write itself. Several threads may use it."""

    def bring(self, out: Tensor, fill: Callable[[memoryview, int], None]) -> None:
        """Have `fill(piece, start)` write the row-major bytes of `out` from byte `start` on, whole elements, in order.

        They may still be under way when this returns.
        """


_find_copy: Callable[[], Copy | None] | None = None
_find_crossing: Callable[[Tensor], Crossing | None] | None = None


def copy_by(find: Callable[[], Copy | None] | None) -> None:
    """Have what needs no cast be copied by `find()`, in this process; by numpy where one of the two is None.

    `find` is called at each copy.
    """
    global _find_copy
    _find_copy = find


def cross_by(find: Callable[[Tensor], Crossing | None] | None) -> None:
    """Have what is not one run of the host's bytes be written by `find(place)`, in this process."""
    global _find_crossing
    _find_crossing = find


class Arrivals:
    """Tensors that come to their places one by one. What lies there is told in the end: a device is waited for once."""

    def __init__(self) -> None:
        self._come: dict[str, Arrival] = {}
        self._there: list[str] = []
        """Those that `_looks` are at."""
        self._looks = Looks(finite=True)

    def take(self, name: str, out: Tensor, tensor: Tensor) -> None:
        """Write `tensor`, cast nearest-even, into `out`; on a device by its current stream, without waiting."""
        if sees(out) and sees(tensor):
            out.copy_(tensor)
            self._looks.at(out)
            self._there.append(name)
        else:
            self._come[name] = take(out, tensor)

    def take_together(self, tensors: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """`take` each (name, out, tensor). On a device, what is copied as it is, is looked at on the way: one pass."""
        for name, out, tensor in tensors:
            if sees(out) and sees(tensor):
                self._looks.at(tensor, out)
                self._there.append(name)
            else:
                self._come[name] = take(out, tensor)
        self._looks.launch()

    def fetch(self, name: str, out: Tensor, fetch: Callable[[memoryview, int], None]) -> None:
        """Have `fetch(piece, start)` fill the bytes of `out`, as `read` does."""
        self._come[name] = read(out, fetch)

    def told(self) -> dict[str, Arrival]:
        """By name, what lies in each place."""
        return self._come | dict(zip(self._there, self._looks.told(), strict=True))


def put(out: Tensor, tensor: Tensor) -> str:
    """Write `tensor`, cast nearest-even, into `out`; the digest of what lies there then.

    Plain copies stay on the calling thread, several of which may copy.
    """
    return _written(out, tensor, finite=False).digest


def take(out: Tensor, tensor: Tensor) -> Arrival:
    """As `put`, and look whether the values are finite."""
    return _written(out, tensor, finite=True)


def read(out: Tensor, fetch: Callable[[memoryview, int], None]) -> Arrival:
    """Have `fetch(piece, start)` fill the bytes of `out` from byte `start` on, and say what lies there then."""
    look = Look(out.dtype, finite=True)

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


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's values are one run of bytes of the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _crossing_to(place: Tensor) -> Crossing | None:
    return None if _find_crossing is None else _find_crossing(place)


def _written(out: Tensor, tensor: Tensor, *, finite: bool) -> Arrival:
    if out.shape != tensor.shape:  # copies below are by address
        raise ManifestMismatch(f"A tensor {list(tensor.shape)} cannot be written to a place {list(out.shape)}.")
    if is_plain(out) and is_plain(tensor):
        return _brought(out, tensor, finite=finite)
    crossing = None if is_plain(out) else _crossing_to(out)
    if crossing is not None:
        return _crossed(out, tensor, crossing, finite=finite)
    out.copy_(tensor)
    return _passed(out.detach().cpu().contiguous(), None, finite=finite)


def _crossed(out: Tensor, tensor: Tensor, crossing: Crossing, *, finite: bool) -> Arrival:
    look = Look(out.dtype, finite=finite)
    values = tensor.detach().cpu().reshape(-1)

    def fill(memory: memoryview, at: int) -> None:
        here = torch.frombuffer(memory, dtype=out.dtype)
        first = at // out.itemsize
        look.over(memory, _writer(here, values[first : first + len(here)]))

    crossing.bring(out, fill)
    return look.arrival


def _brought(out: Tensor, tensor: Tensor, *, finite: bool) -> Arrival:
    copy = _find_copy() if _find_copy is not None and out.dtype == tensor.dtype else None
    if copy is None:
        return _passed(out, _writer(out, tensor), finite=finite)
    return _copied(out, tensor, copy, finite=finite)


def _copied(out: Tensor, tensor: Tensor, copy: Copy, *, finite: bool) -> Arrival:
    """The digest is of the source: it brings each piece into the cache, where `copy` finds it."""
    memory, to, source, width = tensor_bytes(tensor), out.data_ptr(), tensor.data_ptr(), out.itemsize
    digest, largest = Digest(), 0
    for start in range(0, len(memory), PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        digest.update(piece)
        largest = max(largest, copy(to + start, source + start, len(piece), width))
    is_finite = not (finite and out.is_floating_point()) or largest <= largest_bits(out.dtype)
    return Arrival(digest.hexdigest(), is_finite)


def _writer(out: Tensor, tensor: Tensor) -> Callable[[int, int], None]:
    """Writes bytes [start, end) of `out`."""
    if out.dtype == tensor.dtype:
        to, source = np.asarray(tensor_bytes(out)), np.asarray(tensor_bytes(tensor))
        return lambda start, end: np.copyto(to[start:end], source[start:end])
    width, flat, values = out.itemsize, out.view(-1), tensor.reshape(-1)

    def cast(start: int, end: int) -> None:
        flat[start // width : end // width].copy_(values[start // width : end // width])

    return cast


def _passed(out: Tensor, write: Callable[[int, int], None] | None, *, finite: bool) -> Arrival:
    look = Look(out.dtype, finite=finite)
    look.over(tensor_bytes(out), write)
    return look.arrival
