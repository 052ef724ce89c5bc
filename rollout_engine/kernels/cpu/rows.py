"""ctypes wrapper of `rows.cpp`. Callers ask `supports` first."""

import ctypes
from ctypes import c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, check_floats

_SMALL = 1 << 15
"""Number of elements below which a second thread does not pay."""

_CHUNK = 64
"""Rows whose gradients of a norm's weight are added up first: in this order on any number of threads."""

_Layout = tuple[int, int, int, int]
"""(outer, inner, outer stride, inner stride) of the rows of a tensor, in elements."""


class _Rows(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_outer_stride", c_int64),
        ("x_inner_stride", c_int64),
        ("other", c_void_p),
        ("other_outer_stride", c_int64),
        ("other_inner_stride", c_int64),
        ("out", c_void_p),
        ("outer", c_int64),
        ("inner", c_int64),
        ("size", c_int64),
        ("is_bf16", c_int64),
        ("threads", c_int64),
        ("epsilon", c_double),
    ]


class _NormGradients(ctypes.Structure):
    _fields_ = [
        *_Rows._fields_[:3],
        *((name, c_void_p) for name in ("weight", "grad", "grad_x", "grad_weights")),
        *((name, c_int64) for name in ("outer", "inner", "size", "chunk", "is_bf16", "threads")),
        *((name, c_double) for name in ("epsilon", "offset")),
    ]


class _GatedNorm(ctypes.Structure):
    _fields_ = [
        *_Rows._fields_[:3],
        ("gate", c_void_p),
        *((name, c_int64) for name in ("gate_outer_stride", "gate_inner_stride")),
        *((name, c_void_p) for name in ("weight", "out")),
        *((name, c_int64) for name in ("outer", "inner", "size", "group", "is_bf16", "is_gate_bf16", "threads")),
        ("epsilon", c_double),
        *((name, c_int32) for name in ("is_gate_first", "is_sigmoid", "is_rounded")),
    ]


class _GatedNormGradients(ctypes.Structure):
    _fields_ = [
        *_Rows._fields_[:3],
        *_GatedNorm._fields_[3:6],
        *((name, c_void_p) for name in ("grad", "weight", "grad_x", "grad_gate", "grad_weights")),
        *(
            (name, c_int64)
            for name in ("outer", "inner", "size", "group", "chunk", "is_bf16", "is_gate_bf16", "threads")
        ),
        *_GatedNorm._fields_[-4:],
    ]


class _L2Gradients(ctypes.Structure):
    _fields_ = [
        *_Rows._fields_[:3],
        *((name, c_void_p) for name in ("grad", "grad_x")),
        *((name, c_int64) for name in ("outer", "inner", "size", "is_bf16", "threads")),
        ("epsilon", c_double),
    ]


def supports(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether the kernels are available for these tensors: both float32, or both bfloat16, on the CPU."""
    same_dtype = other is None or other.dtype is x.dtype
    return x.dtype in DTYPES and same_dtype and x.is_cpu and build.load_kernels() is not None


def norm(x: Tensor, weight: Tensor, epsilon: float, *, has_offset: bool = False, rounds_once: bool = False) -> Tensor:
    """C++ side of `kernels.norm.rms_norm` of x [..., D], `weight` [D].

    With `has_offset` it is that of `offset_rms_norm`, with `rounds_once` that of `single_rms_norm`. Raises `ValueError`
    for unreadable tensors.
    """
    check_floats("x", x)
    weight = weight.contiguous()
    address("weight", weight, x.dtype, x.shape[-1:] or (1,))
    x, layout = _readable(x)
    name = "rows_offset_norm" if has_offset else "rows_single_norm" if rounds_once else "rows_norm"
    return _run(name, x, layout, weight, (0, 0, 0, 0), epsilon)


def norm_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, epsilon: float, *, of_x: bool, of_weight: bool, has_offset: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The requested gradients of x [..., D], in its dtype, and of `weight` [D], in float32.

    `grad` is the gradient of the result; with `has_offset` its factor is 1 + `weight`. Raises `ValueError` as `norm`
    does.
    """
    check_floats("x", x)
    size = x.shape[-1]
    weight, grad = weight.contiguous(), grad.contiguous()
    x, (outer, inner, *strides) = _readable(x)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None
    grad_weights = torch.zeros(-(-outer * inner // _CHUNK), size) if of_weight else None
    args = _NormGradients(
        x.data_ptr(),
        *strides,
        address("weight", weight, x.dtype, (size,)),
        address("grad", grad, x.dtype, tuple(x.shape)),
        None if grad_x is None else grad_x.data_ptr(),
        None if grad_weights is None else grad_weights.data_ptr(),
        *(outer, inner, size, _CHUNK, x.dtype is torch.bfloat16, _num_threads(x)),
        *(epsilon, float(has_offset)),
    )
    build.declared(rows_norm_gradients=(None, c_void_p)).rows_norm_gradients(ctypes.addressof(args))
    return grad_x, None if grad_weights is None else grad_weights.sum(0)


def activate(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) rounded, times `up` of the same shape [..., D] if given. Raises `ValueError` as `norm` does."""
    check_floats("gate", gate)
    if up is not None:
        check_floats("up", up)
        if up.shape != gate.shape or up.dtype is not gate.dtype:
            raise argument_error("up", up, f"{gate.dtype} {list(gate.shape)} like gate")
    gate, layout = _readable(gate)
    if up is None:
        return _run("rows_activate", gate, layout, None, layout, 0.0)
    up, other = _readable(up)
    if layout[:2] != other[:2]:
        (gate, layout), (up, other) = _readable(gate.contiguous()), _readable(up.contiguous())
    return _run("rows_activate", gate, layout, up, other, 0.0)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of x [..., D], rounded once. Raises `ValueError` as `norm` does."""
    check_floats("x", x)
    x, layout = _readable(x)
    return _run("rows_sigmoid", x, layout, None, layout, 0.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of x [..., D], and x itself above 20, rounded once. Raises `ValueError` as `norm` does."""
    check_floats("x", x)
    x, layout = _readable(x)
    return _run("rows_softplus", x, layout, None, layout, 0.0)


def l2_normalise(x: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(sum(x^2) + epsilon) over the last dimension, float32. Raises `ValueError` as `norm` does."""
    check_floats("x", x)
    x, layout = _readable(x)
    return _run("rows_l2_normalise", x, layout, None, layout, epsilon, torch.float32)


def l2_gradient(x: Tensor, grad: Tensor, epsilon: float) -> Tensor:
    """The gradient of x [..., D] of `l2_normalise`; `grad` float32: of the result. Raises `ValueError` as `norm`."""
    check_floats("x", x)
    x, (outer, inner, *strides) = _readable(x)
    grad = grad.contiguous()
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = _L2Gradients(
        *(x.data_ptr(), *strides, address("grad", grad, torch.float32, tuple(x.shape)), grad_x.data_ptr()),
        *(outer, inner, x.shape[-1], x.dtype is torch.bfloat16, _num_threads(x), epsilon),
    )
    build.declared(rows_l2_gradients=(None, c_void_p)).rows_l2_gradients(ctypes.addressof(args))
    return grad_x


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    group_size: int,
    gate_first: bool,
    is_sigmoid: bool,
    rounds_norm: bool,
) -> Tensor:
    """C++ side of `kernels.norm.gated_rms_norm`: x and `gate` [..., D], `weight` [D], each float32 or bfloat16.

    Raises `ValueError` as `norm` does.
    """
    check_floats("x", x)
    check_floats("gate", gate)
    size = x.shape[-1]
    weight = weight.float().contiguous()
    (x, layout), (gate, gate_layout) = _readable(x), _readable(gate)
    if layout[:2] != gate_layout[:2]:
        (x, layout), (gate, gate_layout) = _readable(x.contiguous()), _readable(gate.contiguous())
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = _GatedNorm(
        *(x.data_ptr(), *layout[2:], gate.data_ptr(), *gate_layout[2:]),
        *(address("weight", weight, torch.float32, (size,)), out.data_ptr()),
        *(*layout[:2], size, group_size, x.dtype is torch.bfloat16, gate.dtype is torch.bfloat16, _num_threads(x)),
        *(epsilon, gate_first, is_sigmoid, rounds_norm),
    )
    build.declared(rows_gated_norm=(None, c_void_p)).rows_gated_norm(ctypes.addressof(args))
    return out


def gated_norm_gradients(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    grad: Tensor,
    epsilon: float,
    *,
    group_size: int,
    gate_first: bool,
    is_sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and `gate`, in their dtypes, and of `weight`, in float32, of `gated_norm` without its roundings.

    Raises `ValueError` as `norm` does.
    """
    check_floats("x", x)
    check_floats("gate", gate)
    size = x.shape[-1]
    weight, grad = weight.float().contiguous(), grad.contiguous()
    (x, layout), (gate, gate_layout) = _readable(x), _readable(gate)
    if layout[:2] != gate_layout[:2]:
        (x, layout), (gate, gate_layout) = _readable(x.contiguous()), _readable(gate.contiguous())
    grad_x, grad_gate = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, gate))
    outer, inner, *_ = layout
    grad_weights = torch.zeros(-(-outer * inner // _CHUNK), size)
    args = _GatedNormGradients(
        *(x.data_ptr(), *layout[2:], gate.data_ptr(), *gate_layout[2:]),
        address("grad", grad, x.dtype, tuple(x.shape)),
        address("weight", weight, torch.float32, (size,)),
        *(grad_x.data_ptr(), grad_gate.data_ptr(), grad_weights.data_ptr()),
        *(outer, inner, size, group_size, _CHUNK),
        *(x.dtype is torch.bfloat16, gate.dtype is torch.bfloat16, _num_threads(x)),
        *(epsilon, gate_first, is_sigmoid, False),
    )
    build.declared(rows_gated_norm_gradients=(None, c_void_p)).rows_gated_norm_gradients(ctypes.addressof(args))
    return grad_x, grad_gate, grad_weights.sum(0)


def _run(
    name: str,
    x: Tensor,
    layout: _Layout,
    other: Tensor | None,
    other_layout: _Layout,
    epsilon: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    outer, inner, x_outer, x_inner = layout
    args = _Rows(
        x.data_ptr(),
        x_outer,
        x_inner,
        None if other is None else other.data_ptr(),
        other_layout[2],
        other_layout[3],
        out.data_ptr(),
        outer,
        inner,
        x.size(-1) if x.dim() else 1,
        x.dtype is torch.bfloat16,
        _num_threads(x),
        epsilon,
    )
    getattr(build.load_kernels(), name)(ctypes.byref(args))
    return out


def _num_threads(x: Tensor) -> int:
    return 1 if x.numel() < _SMALL else torch.get_num_threads()


def _readable(x: Tensor) -> tuple[Tensor, _Layout]:
    """`x` [..., D] and the layout of its rows; a contiguous copy of it if two strides cannot describe them."""
    size = x.size(-1) if x.dim() else 1
    if x.is_contiguous():
        return x, (x.numel() // max(size, 1), 1, size, 0)
    merged: list[tuple[int, int]] = []  # (length, stride), innermost first
    for length, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * length, merged[-1][1])
        elif length != 1:
            merged.append((length, stride))
    if len(merged) > 2 or x.stride(-1) != 1:
        return _readable(x.contiguous())
    if len(merged) < 2:
        outer, stride = merged[0] if merged else (1, 0)
        return x, (outer, 1, stride, 0)
    (inner, inner_stride), (outer, outer_stride) = merged
    return x, (outer, inner, outer_stride, inner_stride)
