"""Encoding of a journal's records: tagged msgpack structs whose arrays are extension types. No code is ever decoded."""

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

_T = TypeVar("_T")
_ARRAY = 1
"""Code of the extension type of arrays: dtype and shape as msgpack, then the bytes, row-major."""
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("?", "|u1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"))}


class RecordError(ValueError):
    """A record has another form than this version reads."""


class RecordCodec(Generic[_T]):
    """Encodes and decodes the records of one type, a struct or a union of tagged ones."""

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoder: Any = msgspec.msgpack.Decoder(kind, ext_hook=_decode_array)

    def encode(self, record: _T) -> bytes:
        """Encode a record. Raises `TypeError` for a value without a form here."""
        return self._encoder.encode(record)

    def decode(self, payload: bytes) -> _T:
        """Decode a record. Raises `RecordError`."""
        try:
            return self._decoder.decode(payload)  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as problem:
            raise RecordError(str(problem)) from None


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"{kind} has no form in a journal")
    form = msgspec.msgpack.encode((value.dtype.str, value.shape))
    content = np.ascontiguousarray(value).tobytes()
    return msgspec.msgpack.Ext(_ARRAY, bytes([len(form)]) + form + content)


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"extension type {code} is none of a journal")
    start = 1 + data[0]
    dtype, shape = msgspec.msgpack.decode(data[1:start], type=tuple[str, tuple[int, ...]])
    if dtype not in _DTYPES or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} {shape} has no form in a journal")
    return np.frombuffer(bytearray(data[start:]), _DTYPES[dtype]).reshape(shape)
