"""Arrays and tensors in messages between ranks."""

from typing import Any

import msgspec
import numpy as np

from rollout_engine.children.values import pack, unpack


def pack_value(value: Any) -> bytes:
    """Encode a value with arrays and tensors in it. Raises `TypeError` for a value that cannot be sent."""
    body, arrays = pack(value)
    return msgspec.msgpack.encode((body, [array.data for array in arrays]))


def unpack_value(body: bytes) -> Any:
    """Decode a value; structs arrive as dicts, tuples as lists."""
    packed, arrays = msgspec.msgpack.decode(body, type=tuple[msgspec.Raw, list[bytearray]])
    return unpack(packed, [np.frombuffer(array, np.uint8) for array in arrays])
