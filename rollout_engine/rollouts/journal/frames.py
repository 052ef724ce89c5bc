"""Frames of a journal's segment: both ends in one file.

    segment   MAGIC | frame | frame | ...
    frame     length u32 | crc32 u32 | checksum u64 | payload          little-endian
    crc32     of length and checksum: a changed header is not taken for a frame that was cut short
    checksum  xxh3-64 of the payload, seeded with the checksum of the frame before it, or the segment's number

A frame is one `write`. So a process that is killed leaves whole frames and perhaps the beginning of one more, which is
cut off; a machine that loses power may also leave zeros up to the end of the file, in whole sectors. Everything else
that does not match is an altered file, which is refused: its frames are chained, so none can be removed or exchanged.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

MAGIC = b"rollout journal\n"
"""First bytes of a segment."""
_HEADER, _CHECKED = struct.Struct("<IIQ"), struct.Struct("<IQ")
_SECTOR_BYTES = 512


class AlteredError(ValueError):
    """A segment holds bytes that no writer and no crash has left there; the message has the position and the reason."""


class Frame(NamedTuple):
    """A frame as it stands in a segment."""

    start: int
    """Position of its header."""
    payload: bytes
    checksum: int


def first_seed(number: int) -> int:
    """The seed of the first frame of segment `number`."""
    return xxhash.xxh3_64_intdigest(MAGIC, seed=number)


def encode_frame(payload: bytes, seed: int) -> tuple[bytes, int]:
    """Return the bytes of a frame and its checksum. `seed`: checksum of the frame before it, or `first_seed`."""
    checksum = xxhash.xxh3_64_intdigest(payload, seed=seed)
    crc = zlib.crc32(_CHECKED.pack(len(payload), checksum))
    return _HEADER.pack(len(payload), crc, checksum) + payload, checksum


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; a write that is cut short, as on a full disk, is followed by another."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_frames(data: bytes, number: int) -> Iterator[Frame]:
    """Iterate over the whole frames of segment `number`; a torn tail ends them. Raises `AlteredError`."""
    if not data.startswith(MAGIC):
        raise AlteredError(f"it does not begin with {MAGIC!r}: another program wrote it")
    position, seed = len(MAGIC), first_seed(number)
    while (frame := _read_frame(data, position, seed)) is not None:
        yield frame
        position, seed = end_of(frame), frame.checksum


def end_of(frame: Frame) -> int:
    """Position behind a frame."""
    return frame.start + _HEADER.size + len(frame.payload)


def _read_frame(data: bytes, start: int, seed: int) -> Frame | None:
    """Read the frame at `start`; None if there is none, or one that is cut short."""
    body = start + _HEADER.size
    if body > len(data):
        return None
    length, crc, checksum = _HEADER.unpack_from(data, start)
    if crc != zlib.crc32(_CHECKED.pack(length, checksum)):
        _require_lost_sectors(data, start, body, "the header")
        return None
    if body + length > len(data):
        return None
    payload = data[body : body + length]
    if xxhash.xxh3_64_intdigest(payload, seed=seed) != checksum:
        _require_lost_sectors(data, start, body + length, "the content")
        return None
    return Frame(start, payload, checksum)


def _require_lost_sectors(data: bytes, start: int, end: int, part: str) -> None:
    """Raise `AlteredError` unless zeros begin inside of the frame, at a sector, and reach the end of the file."""
    last = len(data.rstrip(b"\0"))
    zeros = -(-last // _SECTOR_BYTES) * _SECTOR_BYTES
    if not zeros < min(end, len(data)):
        raise AlteredError(f"{part} of the record at byte {start} does not match its checksum")
