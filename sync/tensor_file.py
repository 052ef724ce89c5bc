"""Writes a safetensors file tensor by tensor, so that no more than one of them is in memory for it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from sync.digests import tensor_bytes, tensor_digest
from sync.errors import ManifestMismatch
from sync.manifest import Form, TensorSpec, dtype_name, torch_dtype
from sync.shared_files import reserve, write_at
from sync.stored_tensor import STORED_DTYPES

_ALIGNMENT = 8
"""Bytes: the offset of the data, as in files of the safetensors library."""
_STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def write_tensor_file(path: Path, forms: Mapping[str, Form], make: Callable[[str], Tensor]) -> list[TensorSpec]:
    """Write a new file of tensors of these forms; returns their specs, in the order of the file.

    Args:
        forms: name -> (dtype, shape).
        make: returns the values of a name; called once for each.

    When it returns the bytes are on the disk. Raises `OSError` if the file is there already, or there is no room;
    `ManifestMismatch` for a tensor of another form.
    """
    specs = [TensorSpec(name, shape, dtype, "") for name, (dtype, shape) in forms.items()]
    specs.sort(key=lambda spec: -torch_dtype(spec.dtype).itemsize)  # keeps each tensor aligned
    header = _header(specs)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve(file, len(header) + sum(spec.num_bytes for spec in specs))
        write_at(file, header, 0)
        start, written = len(header), []
        for spec in specs:
            tensor = make(spec.name).detach().cpu().contiguous()
            if (dtype_name(tensor.dtype), tuple(tensor.shape)) != forms[spec.name]:
                what = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}, expected {forms[spec.name]}"
                raise ManifestMismatch(f"'{spec.name}' cannot be written to {path}: it is {what}.")
            write_at(file, tensor_bytes(tensor), start)
            start += spec.num_bytes
            written.append(msgspec.structs.replace(spec, digest=tensor_digest(tensor)))
        os.fsync(file)
    finally:
        os.close(file)
    return written


def _header(specs: list[TensorSpec]) -> bytes:
    entries, start = {}, 0
    for spec in specs:
        end = start + spec.num_bytes
        stored = _STORED_NAMES[torch_dtype(spec.dtype)]
        entries[spec.name] = {"dtype": stored, "shape": spec.shape, "data_offsets": (start, end)}
        start = end
    text = msgspec.json.encode({"__metadata__": {"format": "pt"}, **entries})
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
