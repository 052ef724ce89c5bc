"""Makes Triton's interpreter as unkind as a device may be, where it is kinder: what a kernel must not rely on.

    programs      in random order, where the interpreter counts them up
    exp, exp2     off by up to 2**-21 of the result, by the input alone; exact at 0, as a device's are
    masked loads  NaN, or -1, in lanes without a value, where the interpreter has 0 (but for scalars)
    memory        NaN, or -1, around every tensor that a kernel is given, which it may read and must not write;
                  uninitialised tensors are NaN, or the largest integer

Integers are divided towards zero as in C by the interpreter itself; `test_harsh_interpreter.py` holds it to that.
"""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_GUARD_BYTES = 4096
"""On either side of a tensor's storage."""
_EXP_ERROR = 2.0**-21


class OutOfBoundsError(Exception):
    """A kernel has written past an end of a tensor that it was given."""


def make_harsh(patch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Make the interpreter harsh until `patch` is undone. `seed` is of the order of programs."""
    _shuffle_programs(patch, np.random.default_rng(seed))
    for name, exact in (("create_exp", np.exp), ("create_exp2", np.exp2)):
        patch.setattr(InterpreterBuilder, name, _inexact(exact))
    patch.setattr(InterpreterBuilder, "create_masked_load", _load)
    patch.setattr(GridExecutor, "_init_args_hst", _guard_arguments)
    patch.setattr(GridExecutor, "_restore_args_dev", _check_and_restore)


def _shuffle_programs(patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx

    def set_grid_dim(self: Any, *sizes: int) -> None:
        set_dim(self, *sizes)
        self.order = rng.permutation(np.prod(sizes))

    def set_grid_idx(self: Any, *index: int) -> None:
        place = self.order[np.ravel_multi_index(index, self.grid_dim)]
        set_index(self, *map(int, np.unravel_index(place, self.grid_dim)))

    patch.setattr(InterpreterBuilder, "set_grid_dim", set_grid_dim)
    patch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)


def _inexact(exact: np.ufunc) -> Any:
    def create(self: Any, handle: TensorHandle) -> TensorHandle:
        x = handle.data
        if x.dtype != np.float32:
            return TensorHandle(exact(x), handle.dtype.scalar)
        bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
        error = ((bits * np.uint32(2654435761)) >> np.uint32(16)) / 32767.5 - 1  # of [-1, 1], by the input alone
        with np.errstate(over="ignore"):
            wrong = (exact(x.astype(np.float64)) * (1 + _EXP_ERROR * error)).astype(np.float32)
        return TensorHandle(np.where(x == 0, np.float32(1), wrong), handle.dtype.scalar)

    return create


def _load(self: Any, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> TensorHandle:
    dtype = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty()))
    if other is not None:
        values = other.data
    elif ptrs.data.size == 1:  # the interpreter loses the 0 that a scalar load gives here
        values = np.zeros_like(ptrs.data, dtype=dtype)
    else:
        values = np.full_like(ptrs.data, np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0], dtype=dtype)
    return TensorHandle(interpreter._interpreter.load(ptrs.data, mask.data, values, dtype), ptrs.get_element_ty())


def _guard_arguments(self: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments, in memory of their own between guards."""
    self.guarded = {}

    def guard(value: Any) -> Any:
        if isinstance(value, tuple):
            return interpreter._tuple_create(value, map(guard, value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.guarded:
            buffer = torch.full((storage.nbytes() + 2 * _GUARD_BYTES,), 255, dtype=torch.uint8)
            _inside(buffer).copy_(_bytes_of(storage))
            self.guarded[storage.data_ptr()] = storage, buffer
        buffer = self.guarded[storage.data_ptr()][1]
        offset = value.storage_offset() + _GUARD_BYTES // value.itemsize
        return torch.empty(0, dtype=value.dtype).set_(buffer.untyped_storage(), offset, value.shape, value.stride())

    return [guard(value) for value in args], {name: guard(value) for name, value in kwargs.items()}


def _check_and_restore(self: Any, *_: Any) -> None:
    for storage, buffer in self.guarded.values():
        if (torch.cat([buffer[:_GUARD_BYTES], buffer[-_GUARD_BYTES:]]) != 255).any():
            raise OutOfBoundsError(f"{self.fn.__name__} writes past an end of {storage.nbytes()} bytes")
        _bytes_of(storage).copy_(_inside(buffer))


def _inside(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[_GUARD_BYTES : len(buffer) - _GUARD_BYTES]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
