"""Frames of blocks: a header that names the bytes behind it, and their digest. Both ends in one file.

    byte   0       8      12     16       24          40    72       88      120     128
           | magic | form | zero | length | namespace | key | digest | zeros | check | data

Numbers are little-endian. `digest` is xxh3-128 of the data, `check` xxh3-64 of the 120 bytes before it: so no byte of
a frame can change, and no frame can stand in for another's, unnoticed.
"""

import struct

import xxhash

HEADER_BYTES = 128
_MAGIC = b"\x89KVblock"
_FORM = 1
_FIELDS = struct.Struct("<8sIIQ16s32s16s32x")
_CHECK = struct.Struct("<Q")


class DamagedBlock(ValueError):
    """A frame is torn or damaged, or is that of another block. The text is the end of a sentence about it."""


def make_header(namespace: bytes, key: bytes, data: memoryview | bytes) -> bytes:
    """The header (128 bytes) to put before `data` (contiguous, uint8). `namespace`: 16 bytes; `key`: 32 bytes."""
    fields = _FIELDS.pack(_MAGIC, _FORM, 0, len(data), namespace, key, _digest(data))
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def read_header(header: bytes, namespace: bytes, key: bytes, num_bytes: int) -> bytes:
    """Check the header of a block of `num_bytes`. Returns the digest of its data. Raises `DamagedBlock`."""
    if len(header) < HEADER_BYTES:
        raise DamagedBlock(f"it ends within its header of {HEADER_BYTES} bytes, at byte {len(header)}")
    fields = header[: _FIELDS.size]
    magic, form, _, length, its_namespace, its_key, digest = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise DamagedBlock(f"it begins with {magic.hex()}, not with {_MAGIC.hex()}")
    if _CHECK.unpack_from(header, _FIELDS.size) != (xxhash.xxh3_64_intdigest(fields),):
        raise DamagedBlock("its header does not have the checksum that it states")
    if form != _FORM:
        raise DamagedBlock(f"its form is {form}, this version reads {_FORM}")
    if (its_namespace, its_key) != (namespace, key):
        raise DamagedBlock(f"it holds block {its_key.hex()} of {its_namespace.hex()}, another one")
    if length != num_bytes:
        raise DamagedBlock(f"its header states {length} bytes, {num_bytes} follow")
    return bytes(digest)


def check_data(data: memoryview, digest: bytes) -> None:
    """Raise `DamagedBlock` unless `data` has the digest that its header states."""
    found = _digest(data)
    if found != digest:
        raise DamagedBlock(f"its bytes have the digest {found.hex()}, its header states {digest.hex()}")


def open_frame(frame: memoryview, namespace: bytes, key: bytes) -> memoryview:
    """The data of a whole frame (contiguous, uint8), without a copy. Raises `DamagedBlock`."""
    digest = read_header(bytes(frame[:HEADER_BYTES]), namespace, key, len(frame) - HEADER_BYTES)
    data = frame[HEADER_BYTES:]
    check_data(data, digest)
    return data


def _digest(data: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()  # unlike the function of one call it lets other threads run
