"""Element-wise changes of a tensor: positions as gaps, new values as the raw bits of the dtype, compressed.

    changed elements     . . x . . . x x . . .        of the row-major tensor
    gaps                 2       3   0                unchanged elements in front of each; 255 and more: in `long gaps`
    values               new bits, cut into one plane for each byte of an element

    streams              gaps (uint8) | long gaps (uint64) | plane 0 | plane 1 ...       each compressed by zlib

If every element is there, the two streams of gaps are left out. Bits are compared and copied, never numbers: NaN
payloads and -0.0 stay. zlib's run-length strategy is nearly as fast and as small as Huffman codes alone (140 MB/s a
core), and shrinks runs too. zlib's other strategies and lzma leave more and take 3 to 20 times as long: positions and
mantissas are nearly random.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sync.errors import ChecksumMismatch

_LONG_GAP = 255
_NUM_GAP_STREAMS = 2
_LEVEL, _MEMORY = 6, 9
"""zlib's compression level, and its memory level: the largest, for fewer and longer blocks."""


class Encoded(NamedTuple):
    """Changes as they are stored."""

    num_changed: int
    streams: list[bytes]


class Changes:
    """Decoded changes of a tensor. Several threads may apply them.

    Args:
        positions: int64, ascending; None: every element.
        values: their bits, unsigned, as wide as an element.
    """

    def __init__(self, positions: NDArray[np.int64] | None, values: NDArray[np.unsignedinteger]) -> None:
        self._positions, self._values = positions, values

    def apply(self, out: memoryview, start: int) -> None:
        """Write the changed elements into `out`, whole elements of the tensor from its byte `start` on."""
        width = self._values.itemsize
        target = np.frombuffer(out, self._values.dtype)
        first = start // width
        if self._positions is None:
            target[:] = self._values[first : first + len(target)]
            return
        low, high = np.searchsorted(self._positions, (first, first + len(target)))
        target[self._positions[low:high] - first] = self._values[low:high]


def encode_changes(old: memoryview, new: memoryview, width: int) -> Encoded:
    """The elements of `new`, `width` bytes each, whose bits are not those of `old`."""
    before, after = _elements(old, width), _elements(new, width)
    positions = np.flatnonzero(before != after)
    if len(positions) == len(after):
        return encode_all(new, width)
    gaps = np.diff(positions, prepend=-1) - 1
    short = np.minimum(gaps, _LONG_GAP).astype(np.uint8)
    long = gaps[gaps >= _LONG_GAP].astype("<u8")
    streams = [_compress(short), _compress(long), *_compress_planes(after[positions])]
    return Encoded(len(positions), streams)


def encode_all(new: memoryview, width: int) -> Encoded:
    """Every element, if the old ones are not available."""
    values = _elements(new, width)
    return Encoded(len(values), _compress_planes(values))


def num_streams(count: int, num_elements: int, width: int) -> int:
    """Number of streams of `count` changed elements of a tensor."""
    return width if count == num_elements else _NUM_GAP_STREAMS + width


def decode_changes(streams: Sequence[memoryview], count: int, num_elements: int, width: int) -> Changes:
    """Decode the `num_streams` streams of `count` changed elements.

    Raises `ChecksumMismatch` unless they are exactly that; no more memory is taken than such changes need.
    """
    positions = None
    if count != num_elements:
        positions = _positions(streams[0], streams[1], count, num_elements)
        streams = streams[_NUM_GAP_STREAMS:]
    planes = np.empty((count, width), np.uint8)
    for i, stream in enumerate(streams):
        planes[:, i] = np.frombuffer(_decompress(stream, count), np.uint8)
    return Changes(positions, planes.reshape(-1).view(f"<u{width}"))


def _positions(short: memoryview, long: memoryview, count: int, num_elements: int) -> NDArray[np.int64]:
    gaps = np.frombuffer(_decompress(short, count), np.uint8).astype(np.int64)
    is_long = gaps == _LONG_GAP
    gaps[is_long] = np.frombuffer(_decompress(long, 8 * int(is_long.sum())), "<u8").astype(np.int64)
    if count and (int(gaps.min()) < 0 or int(gaps.max()) >= num_elements):
        raise ChecksumMismatch("a gap between changes is longer than the tensor")
    positions = np.cumsum(gaps + 1) - 1
    if count and not 0 <= int(positions[-1]) < num_elements:
        raise ChecksumMismatch("changes are outside of the tensor")
    return positions


def _elements(memory: memoryview, width: int) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(memory, f"<u{width}")


def _compress_planes(values: NDArray[np.unsignedinteger]) -> list[bytes]:
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [_compress(np.ascontiguousarray(planes[:, i])) for i in range(values.itemsize)]


def _compress(values: NDArray[np.unsignedinteger]) -> bytes:
    if not values.size:
        return b""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS, _MEMORY, zlib.Z_RLE)
    return stream.compress(values.data) + stream.flush()


def _decompress(stream: memoryview, num_bytes: int) -> bytes:
    """Exactly `num_bytes` bytes. Raises `ChecksumMismatch`."""
    if not num_bytes and not len(stream):
        return b""
    inflating = zlib.decompressobj()
    try:
        content = inflating.decompress(stream, num_bytes + 1)
    except zlib.error as problem:
        raise ChecksumMismatch(f"compressed changes are damaged ({problem})") from None
    if len(content) != num_bytes or not inflating.eof or inflating.unused_data:
        raise ChecksumMismatch(f"compressed changes hold {len(content)} bytes or more, expected {num_bytes}")
    return content
