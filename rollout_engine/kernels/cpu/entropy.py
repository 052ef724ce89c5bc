"""ctypes wrapper of `entropy.cpp`. Callers check that `build.load_kernels()` is not None."""

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import address, argument_error, check_ids
from rollout_engine.kernels.cpu.sampling import readable

_SMALL = 1 << 14
"""Number of logits below which a second thread does not pay."""


class _Rows(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("is_bf16", "rows", "vocab_size", "stride")),
        *((name, c_void_p) for name in ("row", "temperature", "figures", "grad", "grad_logits")),
        ("threads", c_int64),
    ]


def figures(logits: Tensor, rows: Tensor, temperatures: Tensor) -> Tensor:
    """C++ side of `kernels.entropy.row_figures`. Raises `ValueError` for tensors it cannot read."""
    logits = readable(logits)
    check_ids("rows", rows, len(logits), of="the rows of these logits")
    result = torch.empty(len(rows), 3, dtype=torch.float64)
    args = _arguments(logits, rows, temperatures, result)
    _library().entropy_compute(ctypes.addressof(args))
    return result


def gradient(logits: Tensor, temperatures: Tensor, given: Tensor, grad: Tensor) -> Tensor:
    """Gradient [N, V] of the entropies with respect to `logits`, in their dtype, times `grad` float32 [N].

    `given`: figures [N, 3] of all rows. Raises `ValueError` for tensors it cannot read.
    """
    own = readable(logits)
    rows, grad = torch.arange(len(own)), grad.contiguous()
    result = torch.empty(own.shape, dtype=own.dtype)
    args = _arguments(own, rows, temperatures, given)
    args.grad, args.grad_logits = address("grad", grad, torch.float32, (len(own),)), result.data_ptr()
    _library().entropy_gradient(ctypes.addressof(args))
    return result.to(logits.dtype)


def _arguments(logits: Tensor, rows: Tensor, temperatures: Tensor, result: Tensor) -> _Rows:
    count, vocab_size = len(rows), logits.shape[1]
    if vocab_size == 0:
        raise argument_error("logits", logits, "of at least one token")
    return _Rows(
        address("logits", logits, logits.dtype, logits.shape, strided_rows=True),
        logits.dtype == torch.bfloat16,
        count,
        vocab_size,
        logits.stride(0),
        address("rows", rows, torch.int64, (count,)),
        address("temperatures", temperatures, torch.float32, (count,)),
        address("figures", result, torch.float64, (count, 3)),
        threads=1 if count * vocab_size < _SMALL else max(1, min(count, torch.get_num_threads())),
    )


@cache
def _library() -> ctypes.CDLL:
    return build.declared(entropy_compute=(None, c_void_p), entropy_gradient=(None, c_void_p))
