"""Arrays and tensors in messages between ranks."""

from typing import Any, TypeAlias

import msgspec
import numpy as np

from rollout_engine.children.values import pack, unpack
from rollout_engine.kernels.adapters import AdapterRows

RowsBytes: TypeAlias = tuple[bytes, bytes, bytes]
"""The arrays of `AdapterRows`."""


def rows_bytes(rows: AdapterRows | None) -> RowsBytes | None:
    """Rows with adapters as they are sent."""
    return None if rows is None else (rows.rows.tobytes(), rows.slots.tobytes(), rows.blocks.tobytes())


def rows_of(content: RowsBytes | None) -> AdapterRows | None:
    """The rows that `rows_bytes` gave."""
    if content is None:
        return None
    rows, slots, blocks = (np.frombuffer(bytearray(each), np.int32) for each in content)
    return AdapterRows(rows, slots, blocks.reshape(-1, 3))


def pack_value(value: Any) -> bytes:
    """Encode a value with arrays and tensors in it. Raises `TypeError` for what cannot be sent."""
    body, arrays = pack(value)
    return msgspec.msgpack.encode((body, [array.data for array in arrays]))


def unpack_value(body: bytes) -> Any:
    """Decode a value; structs arrive as dicts, tuples as lists."""
    packed, arrays = msgspec.msgpack.decode(body, type=tuple[msgspec.Raw, list[bytearray]])
    return unpack(packed, [np.frombuffer(array, np.uint8) for array in arrays])
