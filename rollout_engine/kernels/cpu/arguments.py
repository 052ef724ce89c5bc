"""Checks of tensors before C++ reads them: it trusts addresses, dtypes, shapes and strides.

Everything wrong is a `ValueError` that names the argument, what was expected and what came. A check costs well under a
microsecond.
"""

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of values, as the kernels read them."""


def address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Address of a dense CPU tensor of this dtype and shape. Raises `ValueError` for any other."""
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.is_contiguous()
        and (place := _place(tensor)) is not None
    ):
        return place
    raise refused(name, tensor, f"a dense {dtype} tensor {list(shape)} on the CPU")


def rows_address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Address of a CPU tensor of this dtype and shape whose last dimension is dense; others may have any strides."""
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.shape == shape
        and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
        and (place := _place(tensor)) is not None
    ):
        return place
    raise refused(name, tensor, f"a {dtype} tensor {list(shape)} on the CPU, dense in its last dimension")


def check_floats(name: str, tensor: Tensor, *, num_dims: int | None = None) -> None:
    """Raise `ValueError` unless `tensor` is float32 or bfloat16, has values on the CPU, and `num_dims` dimensions."""
    if isinstance(tensor, Tensor) and tensor.dtype in DTYPES and (num_dims is None or tensor.dim() == num_dims):
        if _place(tensor) is not None:
            return
    dims = "" if num_dims is None else f" of {num_dims} dimensions"
    raise refused(name, tensor, f"a float32 or bfloat16 tensor{dims} on the CPU")


def check_ids(name: str, ids: Tensor, count: int, *, of: str) -> None:
    """Raise `ValueError` unless every one of the integers `ids` is in [0, count): one past `of` is memory of others."""
    if not ids.numel():
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= count:
        place = ((ids < 0) | (ids >= count)).nonzero()[0].tolist()
        raise ValueError(f"{name} should be in [0, {count}), {of}, and {name}{place} is {int(ids[tuple(place)])}.")


def is_integral(tensor: Tensor) -> bool:
    """Whether its dtype is one of whole numbers; bool is not."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def array_address(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> int:
    """Address of a dense NumPy array of this dtype and, where given, shape. Raises `ValueError` for any other."""
    if (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.flags.c_contiguous
        and (shape is None or array.shape == shape)
    ):
        return int(array.ctypes.data)
    wanted = "" if shape is None else f" {list(shape)}"
    raise refused(name, array, f"a dense NumPy array of {dtype}{wanted}")


def refused(name: str, got: object, expected: str) -> ValueError:
    """The one way to word it."""
    return ValueError(f"{name} should be {expected}, and is {_described(got)}.")


def _place(tensor: Tensor) -> int | None:
    """Address of the values as they stand in memory; None where there are none, or they mean something else."""
    if not tensor.is_cpu or tensor.is_neg():
        return None
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # sparse, or traced
        return None
    return place if place or not tensor.numel() else None  # a wrapper's values are elsewhere, those of `meta` nowhere


def _described(got: object) -> str:
    if isinstance(got, np.ndarray):
        return f"a NumPy array of {got.dtype} {list(got.shape)}, strides {list(got.strides)}"
    if not isinstance(got, Tensor):
        return f"a {type(got).__name__}"
    kind = "" if type(got) in (Tensor, torch.nn.Parameter) else f" ({type(got).__name__})"
    strides = f", strides {list(got.stride())}" if got.layout is torch.strided else f", {got.layout}"
    return f"{got.dtype} {list(got.shape)} on {got.device}{strides}{kind}"
