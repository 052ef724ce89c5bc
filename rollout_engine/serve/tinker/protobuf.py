"""The wire format of Protocol Buffers, as far as Tinker's messages use it (https://protobuf.dev/programming-guides/encoding).

A message is a sequence of fields, each a key (number << 3 | wire type) and a value: 0 is a varint, 1 has 8 bytes,
2 a length and as many bytes, 5 has 4 bytes. Groups (3, 4), which are deprecated, are refused.
"""

import struct
from collections.abc import Iterator

_DOUBLE = struct.Struct("<d")
_MOST_FIELDS = 1 << 20
"""Fields that one call of `read_message` reads."""
_FIXED = {1: 8, 5: 4}
"""Wire type -> bytes."""


def number_field(number: int, value: int) -> bytes:
    """A field with an integer, an enum's number or a bool. 0 is the default, which is not written."""
    return _varint(number << 3) + _varint(value) if value else b""


def bytes_field(number: int, data: bytes) -> bytes:
    """A field with bytes, a text or a message."""
    return b"%b%b%b" % (_varint(number << 3 | 2), _varint(len(data)), data)


def double_field(number: int, value: float) -> bytes:
    """A field with a float64."""
    return _varint(number << 3 | 1) + _DOUBLE.pack(value)


def read_double(data: memoryview) -> float:
    """The float64 of a field of 8 bytes. Raises `ValueError`."""
    if len(data) != _DOUBLE.size:
        raise ValueError(f"expected a float64 of 8 bytes, got {len(data)}")
    return float(_DOUBLE.unpack(data)[0])


def read_message(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a message: number, and an integer in [0, 2**64) or bytes. Raises `ValueError`."""
    place = count = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        number, kind = key >> 3, key & 7
        count += 1
        if not number or count > _MOST_FIELDS:
            raise ValueError(f"expected at most {_MOST_FIELDS} numbered fields, got another at byte {place}")
        if kind == 0:
            value, place = _read_varint(data, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _read_varint(data, place)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"expected wire type 0, 1, 2 or 5, got {kind} at byte {place}")
        if size > len(data) - place:
            raise ValueError(f"expected {size} bytes for field {number}, got {len(data) - place}")
        yield number, data[place : place + size]
        place += size


def read_varints(value: int | memoryview) -> list[int]:
    """Integers of a repeated field: one of them, or many packed into bytes. Raises `ValueError`."""
    if isinstance(value, int):
        return [value]
    found, place = [], 0
    while place < len(value):
        each, place = _read_varint(value, place)
        found.append(each)
    return found


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    """A varint that begins at `place`, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError(f"expected a varint, got the end of the message at byte {place}")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), place
    raise ValueError(f"expected a varint of at most 10 bytes, got a longer one at byte {place}")
