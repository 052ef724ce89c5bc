"""Calls of worker extensions as they cross processes: values of any shape, their arrays in frames of their own.

    pack(value) ──> (msgpack, arrays)         each array or tensor is an extension type: (kind, dtype, shape, index)
    unpack(msgpack, arrays) ──> value         the same, as views of the frames; structs as dicts, tuples as lists

    client: ask ── RpcCall ──> core: answer ── Reply ──> client: its future, one result per rank

Nothing but these two kinds of extension type is decoded, and their bytes are nothing but numbers.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollout_engine.errors import RPCError, RPCTimeoutError
from rollout_engine.frontend.core_client import CoreClient
from rollout_engine.frontend.wire import MAX_FRAME_BYTES, MAX_FRAMES, Frame, Reply, RpcCall, WireError
from sync.digests import tensor_bytes
from sync.errors import SyncError
from sync.manifest import dtype_name, torch_dtype

_ARRAY, _TENSOR = 1, 2
"""Codes of the extension types."""
_ROOM = 4096
"""For what else is in a message."""
_NUMPY = {
    dtype.str: dtype
    for dtype in map(np.dtype, "? i1 u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8".split())  # numbers, as they lie in memory
}


class Packed(NamedTuple):
    """A value ready to travel."""

    body: msgspec.Raw
    arrays: list[np.ndarray]
    """uint8, the memory of the value's own arrays."""


class _Form(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    index: int


def pack(value: Any) -> Packed:
    """Raises `TypeError` for what has no place on the wire, `ValueError` for what is too large for one message."""
    arrays: list[np.ndarray] = []

    def place(found: Any) -> msgspec.msgpack.Ext:
        code, dtype, shape, content = _content_of(found)
        arrays.append(content)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(_Form(dtype, shape, len(arrays) - 1)))

    body = msgspec.msgpack.encode(value, enc_hook=place)
    largest = max([len(body) + _ROOM, *(array.nbytes for array in arrays)])
    if largest > MAX_FRAME_BYTES or len(arrays) >= MAX_FRAMES:
        what = f"{len(arrays)} arrays, the largest part {largest} bytes"
        raise ValueError(f"{what}: a call carries fewer than {MAX_FRAMES} arrays of {MAX_FRAME_BYTES} bytes at most")
    return Packed(msgspec.Raw(body), arrays)


def unpack(body: Frame | msgspec.Raw, arrays: Sequence[np.ndarray]) -> Any:
    """What `pack` made. Raises `WireError`."""
    try:
        return msgspec.msgpack.decode(body, ext_hook=lambda code, data: _rebuilt(code, data, arrays))
    except (msgspec.MsgspecError, SyncError, ValueError, TypeError, RecursionError, OverflowError) as problem:
        raise WireError(f"no value: {problem}") from None


def ask(
    client: CoreClient, method: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None
) -> Future[list[Any]]:
    """Send a call. Raises `RPCError`, before a byte is sent, for arguments that cannot travel."""
    try:
        body, arrays = pack([args, kwargs])
    except (TypeError, ValueError, OverflowError) as problem:
        raise RPCError(f"{method}: {problem}.", method=method) from None
    deadline = None if timeout is None else time.monotonic() + timeout
    return client.ask(
        method,
        lambda reply: unpack(reply.result, reply.arrays),
        lambda number: RpcCall(number, method, body, arrays, deadline),
    )


def answer(call: RpcCall, workers: Callable[[str, list[Any], dict[str, Any]], list[Any]]) -> Reply:
    """Run a call on the core's side. Raises as `workers` does; `RPCTimeoutError` for a call that comes too late."""
    if call.deadline is not None and time.monotonic() > call.deadline:
        raise RPCTimeoutError(f"{call.method}: it had not begun at its deadline, and never will.", method=call.method)
    match unpack(call.arguments, call.arrays):
        case [[*args], {**kwargs}]:
            results = workers(call.method, args, kwargs)
        case _:
            raise RPCError(f"{call.method}: the call has no arguments.", method=call.method)
    try:
        body, arrays = pack(results)
    except (TypeError, ValueError, OverflowError) as problem:
        raise RPCError(f"{call.method} ran, but its result cannot travel: {problem}.", method=call.method) from None
    return Reply(call.number, body, arrays=arrays)


def _content_of(found: Any) -> tuple[int, str, tuple[int, ...], np.ndarray]:
    if isinstance(found, Tensor):
        name = dtype_name(found.dtype)
        torch_dtype(name)  # is one that travels
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
        raise ValueError(f"nothing is of kind {code}, number {form.index}")
    content = arrays[form.index]
    itemsize = torch_dtype(form.dtype).itemsize if code == _TENSOR else _numpy_dtype(form.dtype).itemsize
    if min(form.shape, default=0) < 0 or math.prod(form.shape) * itemsize != content.nbytes:
        raise ValueError(f"{content.nbytes} bytes are no {form.dtype} {form.shape}"[:200])
    if code == _ARRAY:
        return content.view(_numpy_dtype(form.dtype)).reshape(form.shape)
    owned = content if content.flags.writeable else content.copy()  # small ones lie inside the message
    return torch.from_numpy(owned).view(torch_dtype(form.dtype)).view(form.shape)


def _numpy_dtype(name: str) -> np.dtype:
    if name not in _NUMPY:
        raise ValueError(f"no array of {name:.20}")
    return _NUMPY[name]
