"""Checks of tensors before C++ reads them: it trusts addresses, dtypes, shapes and strides.

Every check raises a `ValueError` that names the argument, the expected and the given value, and costs well under a
microsecond.
"""

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of values that the kernels read."""


def address(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, strided_rows: bool = False
) -> int:
    """Address of a contiguous CPU tensor of this dtype and shape. Raises `ValueError` for any other tensor.

    With `strided_rows` only the last dimension has to be contiguous.
    """
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.shape == shape
        and ((tensor.stride(-1) == 1 or tensor.shape[-1] <= 1) if strided_rows else tensor.is_contiguous())
        and (place := _data_address(tensor)) is not None
    ):
        return place
    layout = "contiguous in its last dimension" if strided_rows else "contiguous"
    raise argument_error(name, tensor, f"a {dtype} tensor {list(shape)} on the CPU, {layout}")


def check_floats(name: str, tensor: Tensor, *, num_dims: int | None = None) -> None:
    """Raise `ValueError` unless `tensor` is float32 or bfloat16, has values on the CPU, and `num_dims` dimensions."""
    if isinstance(tensor, Tensor) and tensor.dtype in DTYPES and (num_dims is None or tensor.dim() == num_dims):
        if _data_address(tensor) is not None:
            return
    dims = "" if num_dims is None else f" of {num_dims} dimensions"
    raise argument_error(name, tensor, f"a float32 or bfloat16 tensor{dims} on the CPU")


def check_ids(name: str, ids: Tensor, count: int, *, of: str) -> None:
    """Raise `ValueError` unless every one of the integers `ids` is in [0, count), the number of `of`."""
    if not ids.numel():
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= count:
        place = ((ids < 0) | (ids >= count)).nonzero()[0].tolist()
        raise ValueError(f"{name} should be in [0, {count}), {of}, and {name}{place} is {int(ids[tuple(place)])}.")


def is_integral(tensor: Tensor) -> bool:
    """Whether the dtype holds integers; bool does not count."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def array_address(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> int:
    """Address of a contiguous NumPy array of this dtype and, if given, shape. Raises `ValueError` for any other."""
    if (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.flags.c_contiguous
        and (shape is None or array.shape == shape)
    ):
        # `ctypes.data` takes twice as long, but torch warns of arrays that are read-only.
        return torch.from_numpy(array).data_ptr() if array.flags.writeable else int(array.ctypes.data)
    wanted = "" if shape is None else f" {list(shape)}"
    raise argument_error(name, array, f"a contiguous NumPy array of {dtype}{wanted}")


def argument_error(name: str, got: object, expected: str) -> ValueError:
    """A `ValueError` that argument `name` should be `expected`, with a description of `got`."""
    return ValueError(f"{name} should be {expected}, and is {_described(got)}.")


def _data_address(tensor: Tensor) -> int | None:
    """Address of the values; None if there are none in CPU memory, or a flag changes their meaning."""
    if not tensor.is_cpu or tensor.is_neg():
        return None
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # sparse, or traced
        return None
    return place if place or not tensor.numel() else None  # tensor subclasses and `meta` tensors have address 0


def _described(got: object) -> str:
    if isinstance(got, np.ndarray):
        return f"a NumPy array of {got.dtype} {list(got.shape)}, strides {list(got.strides)}"
    if not isinstance(got, Tensor):
        return f"a {type(got).__name__}"
    kind = "" if type(got) in (Tensor, torch.nn.Parameter) else f" ({type(got).__name__})"
    strides = f", strides {list(got.stride())}" if got.layout is torch.strided else f", {got.layout}"
    return f"{got.dtype} {list(got.shape)} on {got.device}{strides}{kind}"
