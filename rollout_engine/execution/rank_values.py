"""Arrays and tensors in messages between ranks."""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from sync.digests import tensor_bytes
from sync.manifest import dtype_name, torch_dtype

_ARRAY, _TENSOR = 1, 2


def pack_value(value: Any) -> bytes:
    """Encode a value with arrays and tensors in it. Raises `TypeError` for what cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_encoded)


def unpack_value(body: bytes) -> Any:
    """Decode a value; structs arrive as dicts, tuples as lists."""
    return msgspec.msgpack.decode(body, ext_hook=_decoded)


def _encoded(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray):
        tensor, code = torch.from_numpy(np.ascontiguousarray(value)), _ARRAY
    elif isinstance(value, Tensor):
        tensor, code = value.detach().cpu().contiguous(), _TENSOR
    else:
        raise TypeError(f"a {type(value).__name__} cannot be sent to another rank")
    header = msgspec.msgpack.encode((dtype_name(tensor.dtype), tuple(tensor.shape)))
    return msgspec.msgpack.Ext(code, len(header).to_bytes(4, "little") + header + bytes(tensor_bytes(tensor)))


def _decoded(code: int, data: memoryview) -> Any:
    end = 4 + int.from_bytes(data[:4], "little")
    name, shape = msgspec.msgpack.decode(data[4:end], type=tuple[str, tuple[int, ...]])
    values = torch.frombuffer(bytearray(data[end:]) or bytearray(8), dtype=torch_dtype(name))
    tensor = values[: int(np.prod(shape))].view(shape)
    return tensor if code == _TENSOR else tensor.numpy()
