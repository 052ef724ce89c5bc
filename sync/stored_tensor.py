"""One tensor of a safetensors file, and the dtypes that such files have."""

from collections.abc import Callable

import torch

from sync.file_snapshot import SnapshotFile
from sync.lazy_tensor import FileTensor

STORED_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Dtypes by the names that safetensors gives them."""


class StoredTensor(FileTensor):
    """One tensor of a checkpoint, as its file's header declares it: `start` is its first byte in the file."""

    def __init__(
        self,
        name: str,
        stored_dtype: str,
        shape: tuple[int, ...],
        file: SnapshotFile,
        start: int,
        check: Callable[[], None],
    ) -> None:
        super().__init__(shape, STORED_DTYPES[stored_dtype], lambda out, at: file.fetch(out, start + at), check)
        self.name, self.path = name, file.path
        self.stored_dtype = stored_dtype
        """The dtype as safetensors spells it: F32, BF16, I64, ..."""
