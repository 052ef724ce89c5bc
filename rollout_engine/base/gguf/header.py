"""Reads the header of a GGUF file: its metadata, and the places of its tensors.

    "GGUF"  version: u32  number of tensors: u64  number of values: u64
    values   key, type: u32, value
    tensors  name, number of dimensions: u32, dimensions: u64 (the fastest first), type: u32, offset: u64
    padding to the alignment, then the data that offsets count from

Numbers are little-endian, strings a u64 and UTF-8 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Nothing
is mapped, and nothing longer than the file is read or allocated, whatever a damaged header claims.
"""

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from rollout_engine.base.errors import ConfigError
from sync.own_files import open_regular

SUFFIX = ".gguf"
F32 = 0
"""The type of float32 tensors."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct`, by the type of a value."""
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"

_Value = TypeVar("_Value")


class GgufTensor(NamedTuple):
    """An entry of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, the fastest dimension last."""
    type: int
    """Number of the format, as `gguf.GGMLQuantizationType` has it."""
    start: int
    """The first byte in the file."""


class GgufHeader(NamedTuple):
    """The metadata and the tensors of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: int
    """The first byte of the data."""
    alignment: int
    """Each tensor begins at a multiple of it, counted from the data's first byte."""

    @classmethod
    def read(cls, path: Path) -> "GgufHeader":
        """Raises `ConfigError`, naming the file, if it cannot be opened or its header is cut or damaged."""
        with naming_damage(path), os.fdopen(_open(path), "rb") as file:
            return _Reader(file).header(path)

    def get(self, key: str, kind: type[_Value]) -> _Value | None:
        """The value of `key`; None if the file has none. Raises `ConfigError` unless it is of `kind`."""
        value: _Value | None = self.metadata.get(key)
        if value is None or type(value) is kind:
            return value
        raise ConfigError(f"{self.path}: {key}={value!r:.60} is of another type: expected {kind.__name__}.")

    def need(self, key: str, kind: type[_Value]) -> _Value:
        """The value of `key`, as `get` reads it. Raises `ConfigError` if the file has none."""
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.path}: its metadata has no {key}, without which the model cannot be built.")
        return value

    def floats(self, name: str) -> list[float]:
        """The values of a float32 tensor. Raises `ConfigError` if it is of another type, or the file is cut."""
        tensor = self.tensors[name]
        if tensor.type != F32:
            raise ConfigError(f"{self.path}: {name} has type {tensor.type}; expected float32 ({F32}).")
        with naming_damage(self.path), os.fdopen(_open(self.path), "rb") as file:
            reader = _Reader(file)
            file.seek(tensor.start)
            return list(reader.numbers("f", math.prod(tensor.shape)))


class DamagedGguf(Exception):
    """The bytes are not those of a GGUF file; the message is the reason."""


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Re-raise `DamagedGguf` as a `ConfigError` about the file."""
    try:
        yield
    except DamagedGguf as problem:
        raise ConfigError(f"{path} is not a whole GGUF file: {problem}. Download or convert it again.") from None


def _open(path: Path) -> int:
    try:
        return open_regular(path)
    except OSError as problem:
        raise ConfigError(f"{path} cannot be opened: {problem.strerror}.") from None


class _Reader:
    """Reads values one after the other, and refuses those that are longer than the rest of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def header(self, path: Path) -> GgufHeader:
        if (magic := self._bytes(4)) != _MAGIC:
            raise DamagedGguf(f"it begins with {magic!r}, not {_MAGIC!r}")
        (version,) = self.numbers("I")
        if version not in _VERSIONS:
            raise DamagedGguf(f"its version is {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are read")
        num_tensors, num_values = self.numbers("Q", 2)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            _refuse_second(key, metadata)
            metadata[key] = self._value(*self.numbers("I"))
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            tensor = self._tensor()
            _refuse_second(tensor.name, tensors)
            tensors[tensor.name] = tensor
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise DamagedGguf(f"{_ALIGNMENT}={alignment!r:.40} is not a power of two")
        data = -(-self._file.tell() // alignment) * alignment
        for name, tensor in tensors.items():
            tensors[name] = tensor._replace(start=data + tensor.start)
            if data + tensor.start > self._size:
                raise DamagedGguf(f"tensor {name!r:.60} begins at byte {data + tensor.start}, and it has {self._size}")
        return GgufHeader(path, metadata, tensors, data, alignment)

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """Read `count` numbers of a format of `struct`."""
        content = self._bytes(count * struct.calcsize(f"<{form}"))
        return struct.unpack(f"<{count}{form}", content)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind != _ARRAY:
            raise DamagedGguf(f"a value has type {kind}, which is not known")
        (item,) = self.numbers("I")
        (count,) = self.numbers("Q")
        if item in _NUMBERS:
            return list(self.numbers(_NUMBERS[item], count))
        if item != _STRING:
            raise DamagedGguf(f"an array has items of type {item}, which is not read")
        return [self._string() for _ in range(count)]

    def _tensor(self) -> GgufTensor:
        name = self._string()
        (num_dimensions,) = self.numbers("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise DamagedGguf(
                f"tensor {name!r:.60} has {num_dimensions} dimensions; at most {_MAX_DIMENSIONS} are allowed"
            )
        shape = self.numbers("Q", num_dimensions)[::-1]
        (kind,) = self.numbers("I")
        (start,) = self.numbers("Q")
        return GgufTensor(name, shape, kind, start)

    def _string(self) -> str:
        content = self._bytes(*self.numbers("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise DamagedGguf(f"a string at byte {self._file.tell() - len(content)} is not UTF-8") from None

    def _bytes(self, count: int) -> bytes:
        at = self._file.tell()
        if count > self._size - at:
            raise DamagedGguf(f"{count} bytes are expected at byte {at}, and it has {self._size}")
        content = self._file.read(count)
        if len(content) < count:
            raise DamagedGguf("it was cut while it was read")
        return content


def _refuse_second(name: str, known: dict[str, Any]) -> None:
    if name in known:
        raise DamagedGguf(f"{name!r:.60} is there twice")
