"""Encoding of arguments and results of calls between processes, with arrays and tensors in frames beside them.

    pack(value) ──> (msgpack, arrays)               an array becomes an extension type: (dtype, shape, index, start)
    unpack(msgpack, arrays, kind) ──> value         checked against a type; large arrays are views of the frames

There are two extension types, for arrays and tensors, and their bytes hold numbers only; no other is decoded. Unless
`kind` says otherwise, structs arrive as dicts and tuples as lists.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollout_engine.process.wire import MAX_FRAME_BYTES, MAX_FRAMES, Frame, WireError
from sync.digests import tensor_bytes
from sync.errors import SyncError
from sync.manifest import dtype_name, torch_dtype

_ARRAY, _TENSOR = 1, 2
"""Codes of the extension types."""
_ROOM = 4096
"""Bytes reserved for the other fields of a message."""
_SMALL_BYTES = 1 << 16
"""Arrays up to this size are copied into the first of a value's arrays; larger ones are sent without a copy."""
_ALIGNMENT = 16
_NUMPY = {dtype.str: dtype for dtype in map(np.dtype, "? i1 u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8".split())}


class Packed(NamedTuple):
    """A value encoded by `pack`."""

    body: msgspec.Raw
    arrays: list[np.ndarray]
    """uint8 each: first all small arrays end to end, then the memory of each large one."""


class _Form(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    index: int
    """Index into the value's arrays."""
    start: int
    """Offset of its first byte there."""


def pack(value: Any) -> Packed:
    """Encode a value. Raises `TypeError` for what cannot be sent, `ValueError` for more than fits in one message."""
    small: list[np.ndarray] = []
    large: list[np.ndarray] = []
    num_small_bytes = 0

    def place(found: Any) -> msgspec.msgpack.Ext:
        nonlocal num_small_bytes
        code, dtype, shape, content = _content_of(found)
        if content.nbytes > _SMALL_BYTES:
            large.append(content)
            index, start = len(large), 0
        else:
            padding = np.zeros(-content.nbytes % _ALIGNMENT, np.uint8)
            small.extend((content, padding))
            index, start = 0, num_small_bytes
            num_small_bytes += content.nbytes + padding.nbytes
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(_Form(dtype, shape, index, start)))

    body = msgspec.msgpack.encode(value, enc_hook=place)
    largest = max([len(body) + _ROOM, num_small_bytes, *(array.nbytes for array in large)])
    if largest > MAX_FRAME_BYTES or len(large) + 1 >= MAX_FRAMES:
        what = f"{len(large)} large arrays, the largest part {largest} bytes"
        raise ValueError(f"{what}: a call carries fewer than {MAX_FRAMES} arrays of {MAX_FRAME_BYTES} bytes at most")
    if not (small or large):
        return Packed(msgspec.Raw(body), [])
    return Packed(msgspec.Raw(body), [np.concatenate([np.zeros(0, np.uint8), *small]), *large])


def unpack(body: Frame | msgspec.Raw, arrays: Sequence[np.ndarray], kind: Any = Any) -> Any:
    """Decode what `pack` made, as type `kind`. Raises `WireError`."""
    try:
        return msgspec.msgpack.decode(body, type=kind, ext_hook=lambda code, data: _rebuilt(code, data, arrays))
    except (
        msgspec.MsgspecError,
        SyncError,
        ValueError,
        TypeError,
        RecursionError,
        OverflowError,
        MemoryError,
    ) as problem:
        raise WireError(str(problem)) from None


def _content_of(found: Any) -> tuple[int, str, tuple[int, ...], np.ndarray]:
    if isinstance(found, Tensor):
        name = dtype_name(found.dtype)
        torch_dtype(name)  # raises for dtypes that cannot be sent
        data = np.frombuffer(tensor_bytes(found.detach().cpu().contiguous()), np.uint8)
        return _TENSOR, name, tuple(found.shape), data
    if isinstance(found, np.ndarray) and found.dtype.str in _NUMPY:
        data = np.ascontiguousarray(found).reshape(-1).view(np.uint8)
        return _ARRAY, found.dtype.str, found.shape, data
    what = f"array of {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
    raise TypeError(f"{what} has no place in a call between processes: {found!r:.80}")


def _rebuilt(code: int, data: memoryview, arrays: Sequence[np.ndarray]) -> np.ndarray | Tensor:
    form = msgspec.msgpack.decode(data, type=_Form)
    if code not in (_ARRAY, _TENSOR) or not 0 <= form.index < len(arrays) or len(form.shape) > 64:
        raise ValueError(f"no array is of kind {code}, number {form.index}")
    itemsize = torch_dtype(form.dtype).itemsize if code == _TENSOR else _numpy_dtype(form.dtype).itemsize
    stop = form.start + math.prod(form.shape) * itemsize
    if min([form.start, *form.shape]) < 0 or form.start % _ALIGNMENT or stop > arrays[form.index].nbytes:
        raise ValueError(f"{arrays[form.index].nbytes} bytes hold no {form.dtype} {form.shape}"[:200])
    content = arrays[form.index][form.start : stop]
    if code == _ARRAY:
        return content.view(_numpy_dtype(form.dtype)).reshape(form.shape)
    if not content.size:  # torch gives it a stride of 0, with which it cannot be viewed as another dtype
        return torch.empty(form.shape, dtype=torch_dtype(form.dtype))
    owned = content if content.flags.writeable else content.copy()  # a message may be read-only
    return torch.from_numpy(owned).view(torch_dtype(form.dtype)).view(form.shape)


def _numpy_dtype(name: str) -> np.dtype:
    if name not in _NUMPY:
        raise ValueError(f"no array of {name:.20}")
    return _NUMPY[name]
