"""Encoding of values for other processes, with arrays and tensors in frames next to them: the one codec for arrays.

    pack(value) ──> (msgpack, arrays)               an array becomes an extension type: (dtype, shape, index, start)
    unpack(msgpack, arrays, kind) ──> value         checked against a type; large arrays are views of the frames

Of a long value, lists of numbers or texts, bytes, texts and lists of structs (column by column) become arrays, too: a
message is short compared with its arrays, however long its lists are. Each has an extension type; no other type is
decoded. Unless `kind` requires other types, structs arrive as dicts and tuples as lists.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollout_engine.children.failure import WireError
from sync.digests import tensor_bytes
from sync.errors import SyncError
from sync.manifest import dtype_name, torch_dtype

_ARRAY, _TENSOR, _NUMBERS, _BYTES, _TEXTS, _RECORDS = 1, 2, 3, 4, 5, 6
"""Codes of the extension types."""
LONG_BYTES = 1 << 16
"""Bytes of a value, arrays not counted, beyond which its lists of numbers, its bytes and texts become arrays."""
_MAX_OBJECTS = 1 << 25
"""Most objects that the arrays of one value become again."""
_SMALL_BYTES = 1 << 16
"""Arrays up to this size are copied into the first of a value's arrays; larger ones are sent without a copy."""
_ALIGNMENT = 16
_MAX_DEPTH = 16
"""Levels of a value whose lists are looked at."""
_LONG_LIST, _LONG_TEXT = 64, 1 << 12
"""Shorter lists, bytes and texts stay in the body."""
Frame = bytes | bytearray | memoryview
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


class _Columns:
    """A long part of a value: as arrays, or as columns by name."""

    def __init__(self, code: int, *arrays: np.ndarray, records: dict[str, Any] | None = None) -> None:
        self.code, self.arrays, self.records = code, arrays, records


def pack(value: Any) -> Packed:
    """Encode a value. Raises `TypeError`, `ValueError` or `OverflowError` for a value that cannot be sent."""
    small: list[np.ndarray] = []
    large: list[np.ndarray] = []
    num_small_bytes = 0

    def form(content: np.ndarray, dtype: str, shape: tuple[int, ...]) -> _Form:
        nonlocal num_small_bytes
        if content.nbytes > _SMALL_BYTES:
            large.append(content)
            return _Form(dtype, shape, len(large), 0)
        padding = np.zeros(-content.nbytes % _ALIGNMENT, np.uint8)
        small.extend((content, padding))
        start, num_small_bytes = num_small_bytes, num_small_bytes + content.nbytes + padding.nbytes
        return _Form(dtype, shape, 0, start)

    def place(found: Any) -> msgspec.msgpack.Ext:
        if not isinstance(found, _Columns):
            found = _Columns(_TENSOR if isinstance(found, Tensor) else _ARRAY, found)
        if found.records is not None:
            return msgspec.msgpack.Ext(found.code, msgspec.msgpack.encode(found.records, enc_hook=place))
        forms = [form(content, dtype, shape) for dtype, shape, content in map(_content_of, found.arrays)]
        return msgspec.msgpack.Ext(found.code, msgspec.msgpack.encode(forms))

    body = msgspec.msgpack.encode(value, enc_hook=place)
    if len(body) > LONG_BYTES:
        small, large, num_small_bytes = [], [], 0
        body = msgspec.msgpack.encode(_in_columns(value), enc_hook=place)
    if not (small or large):
        return Packed(msgspec.Raw(body), [])
    return Packed(msgspec.Raw(body), [np.concatenate([np.zeros(0, np.uint8), *small]), *large])


def unpack(body: Frame | msgspec.Raw, arrays: Sequence[np.ndarray], kind: Any = Any) -> Any:
    """Decode the result of `pack`, as type `kind`. Raises `WireError`."""
    try:
        return msgspec.msgpack.decode(body, type=kind, ext_hook=_Reader(arrays).read)
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


def _in_columns(value: Any, depth: int = 0) -> Any:
    """Replace the long parts of a value by `_Columns`."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        return value
    if _is_record(kind):
        kind, value = dict, msgspec.structs.asdict(value)
    if kind is dict:
        return {key: _in_columns(item, depth + 1) for key, item in value.items()}
    if kind is str and len(value) > _LONG_TEXT:
        return _Columns(_TEXTS, np.frombuffer(value.encode(), np.uint8))
    if kind is bytes and len(value) > _LONG_TEXT:
        return _Columns(_BYTES, np.frombuffer(value, np.uint8))
    if kind not in (list, tuple):
        return value
    return _list_in_columns(value, depth) or [_in_columns(item, depth + 1) for item in value]


def _list_in_columns(values: Sequence[Any], depth: int) -> _Columns | None:
    """The columns of a long list, if it is one of numbers, of lists of numbers, of texts, or of structs of one type."""
    kinds = set(map(type, values))
    if kinds and kinds <= {list, tuple}:
        numbers = _as_numbers(partial(chain.from_iterable, values), sum(map(len, values)))
        return None if numbers is None else _Columns(_NUMBERS, numbers, np.array([*map(len, values)], np.int32))
    if len(values) < _LONG_LIST:
        return None
    if kinds == {str}:
        texts = [text.encode() for text in values]
        return _Columns(_TEXTS, np.frombuffer(b"".join(texts), np.uint8), np.array([*map(len, texts)], np.int32))
    if len(kinds) == 1 and _is_record(next(iter(kinds))):
        record: Any = next(iter(kinds))
        columns = {
            name: _in_columns([getattr(value, name) for value in values], depth + 1)
            for name in record.__struct_fields__
        }
        return _Columns(_RECORDS, records=columns) if columns else None
    numbers = _as_numbers(partial(iter, values), len(values))
    return None if numbers is None else _Columns(_NUMBERS, numbers)


def _as_numbers(values: Callable[[], Iterable[Any]], count: int) -> np.ndarray | None:
    """Many ints or floats as an array; None for anything else, or ints of more than 64 bits."""
    if count > _MAX_OBJECTS:
        raise ValueError(
            f"a list has {count} numbers, and lists may have {_MAX_OBJECTS}; give arrays, or several calls"
        )
    kinds = set(map(type, values())) if count >= _LONG_LIST else set()
    if kinds == {float}:
        return np.fromiter(values(), np.float64, count)
    if kinds != {int}:
        return None
    try:
        numbers = np.fromiter(values(), np.int64, count)
    except OverflowError:
        return None
    fits = numbers.min() >= -(2**31) and numbers.max() < 2**31
    return numbers.astype(np.int32) if fits else numbers


def _is_record(kind: type) -> bool:
    """Whether values of this type arrive as dicts of their fields."""
    if not issubclass(kind, msgspec.Struct):
        return False
    config = kind.__struct_config__
    return config.tag is None and not config.array_like


def _content_of(found: Any) -> tuple[str, tuple[int, ...], np.ndarray]:
    if isinstance(found, Tensor):
        name = dtype_name(found.dtype)
        torch_dtype(name)  # raises for dtypes that cannot be sent
        data = np.frombuffer(tensor_bytes(found.detach().cpu().contiguous()), np.uint8)
        return name, tuple(found.shape), data
    if isinstance(found, np.ndarray) and found.dtype.str in _NUMPY:
        data = np.ascontiguousarray(found).reshape(-1).view(np.uint8)
        return found.dtype.str, found.shape, data
    what = f"array of {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
    raise TypeError(f"{what} has no place in a call between processes: {found!r:.80}")


class _Reader:
    """Makes values of the extension types again, within one budget of objects."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays
        self._num_objects_left = _MAX_OBJECTS

    def read(self, code: int, data: memoryview) -> Any:
        """Return the value of an extension type. Raises `ValueError` and msgspec's errors."""
        if code == _RECORDS:
            return self._records(msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=self.read))
        forms = msgspec.msgpack.decode(data, type=list[_Form])
        if not _ARRAY <= code <= _TEXTS or not 1 <= len(forms) <= (2 if code in (_NUMBERS, _TEXTS) else 1):
            raise ValueError(f"no value is of kind {code} with {len(forms)} arrays")
        if code == _TENSOR:
            return self._tensor(forms[0])
        values, *lengths = (self._array(form) for form in forms)
        if code == _ARRAY:
            return values
        if code in (_BYTES, _TEXTS):
            if values.dtype != np.uint8:
                raise ValueError(f"no text or bytes are {values.dtype}")
            self._count(len(values) // 8)
            content = values.tobytes()
            if code == _BYTES:
                return content
            return self._divide(content, lengths[0], str, "utf-8") if lengths else str(content, "utf-8")
        if values.ndim != 1 or values.dtype.str not in ("<i4", "<i8", "<f8"):
            raise ValueError(f"no list is {values.dtype} {values.shape}")
        self._count(len(values))
        return self._divide(values.tolist(), lengths[0], list) if lengths else values.tolist()

    def _divide(self, values: Any, lengths: np.ndarray, kind: Callable[..., Any], *options: str) -> list[Any]:
        fits = lengths.ndim == 1 and lengths.dtype == np.int32 and lengths.min(initial=0) >= 0
        if not fits or lengths.sum(dtype=np.int64) != len(values):
            raise ValueError(f"no parts of {len(values)} have lengths {lengths.dtype} {lengths.shape}")
        self._count(2 * len(lengths))
        ends = accumulate(lengths.tolist(), initial=0)
        return [kind(values[start:stop], *options) for start, stop in pairwise(ends)]

    def _records(self, columns: dict[str, Any]) -> list[dict[str, Any]]:
        if not all(type(column) is list for column in columns.values()):
            raise ValueError("columns of structs are lists")
        self._count(8 * len(columns) * max(map(len, columns.values()), default=0))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _count(self, num_objects: int) -> None:
        self._num_objects_left -= num_objects
        if self._num_objects_left < 0:
            raise ValueError(f"the lists of a value have more than {_MAX_OBJECTS} numbers, or 8 bytes of text for each")

    def _array(self, form: _Form) -> np.ndarray:
        dtype = _numpy_dtype(form.dtype)
        return self._bytes(form, dtype.itemsize).view(dtype).reshape(form.shape)

    def _tensor(self, form: _Form) -> Tensor:
        content = self._bytes(form, torch_dtype(form.dtype).itemsize)
        if not content.size:  # torch gives it a stride of 0, with which it cannot be viewed as another dtype
            return torch.empty(form.shape, dtype=torch_dtype(form.dtype))
        if not content.flags.writeable:  # a message may be read-only
            self._count(len(content) // 8)
            content = content.copy()
        return torch.from_numpy(content).view(torch_dtype(form.dtype)).view(form.shape)

    def _bytes(self, form: _Form, itemsize: int) -> np.ndarray:
        if not 0 <= form.index < len(self._arrays) or len(form.shape) > 64:
            raise ValueError(f"no array is number {form.index}")
        array, stop = self._arrays[form.index], form.start + math.prod(form.shape) * itemsize
        if min([form.start, *form.shape]) < 0 or form.start % _ALIGNMENT or stop > array.nbytes:
            raise ValueError(f"{array.nbytes} bytes hold no {form.dtype} {form.shape}"[:200])
        return array[form.start : stop]


def _numpy_dtype(name: str) -> np.dtype:
    if name not in _NUMPY:
        raise ValueError(f"no array of {name:.20}")
    return _NUMPY[name]
