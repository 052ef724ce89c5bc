"""ctypes wrapper of `convolution.cpp` and `convolution_backward.cpp`. Callers ask `supports` first."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, check_floats
from rollout_engine.kernels.cpu.state_chunks import ChunkTable
from rollout_engine.kernels.state_chunks import StateChunks

_SMALL = 1 << 15
"""Number of elements below which a second thread does not pay."""


def supports(*tensors: Tensor) -> bool:
    """Whether the kernel is available for these tensors: float32 or bfloat16, on the CPU."""
    return all(x.is_cpu and x.dtype in DTYPES for x in tensors) and build.load_kernels() is not None


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, chunks: StateChunks, states: Tensor | None
) -> Tensor:
    """C++ side of `kernels.convolution.causal_convolution`, which has checked `chunks`.

    Raises `ValueError` for tensors that it cannot read, among them `states` that are not contiguous.
    """
    check_floats("x", x, num_dims=2)
    (num_tokens, num_channels), width = x.shape, weight.shape[-1]
    x = x if x.stride(1) == 1 or num_channels == 1 else x.contiguous()
    is_half = weight.dtype is torch.bfloat16 and (bias is None or bias.dtype is torch.bfloat16)
    dtype = torch.bfloat16 if is_half else torch.float32
    weight, bias = weight.to(dtype).contiguous(), None if bias is None else bias.to(dtype).contiguous()
    call = _Call()
    call.x = address("x", x, x.dtype, (num_tokens, num_channels), strided_rows=True)
    call.weight = address("weight", weight, dtype, (num_channels, width))
    if bias is not None:
        call.bias = address("bias", bias, dtype, (num_channels,))
    if states is not None:
        call.states = address("states", states, x.dtype, (len(states), width - 1, num_channels))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    call.out, call.x_token = out.data_ptr(), x.stride(0)
    call.chunks = ChunkTable.of(chunks)
    call.num_channels, call.width = num_channels, width
    call.half, call.half_weights, call.silu = x.dtype is torch.bfloat16, is_half, silu
    run = ChannelRun(0, 0, num_channels)
    call.runs, call.num_runs = ctypes.addressof(run), 1
    call.num_threads = 1 if x.numel() < _SMALL else torch.get_num_threads()
    place = ctypes.addressof(call)
    scratch = torch.empty(_library().convolution_scratch(place) * call.num_threads, dtype=torch.uint8)
    call.scratch = scratch.data_ptr()
    _library().convolution_run(place)
    return out


def find_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, *, silu: bool, chunks: StateChunks
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [T, C], in its dtype, of `weight` [C, W] and of the bias [C], both in float32.

    `grad` [T, C] is that of the result, for `chunks` that are sequences from zeros. Raises `ValueError` as `convolve`
    does.
    """
    check_floats("x", x, num_dims=2)
    (num_tokens, num_channels), width = x.shape, weight.shape[-1]
    x = x if x.stride(1) == 1 or num_channels == 1 else x.contiguous()
    grad = grad if grad.stride(1) == 1 or num_channels == 1 else grad.contiguous()
    weight32, bias32 = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_weight, grad_bias = torch.empty(num_channels, width), torch.empty(num_channels)
    call = _BackwardCall(
        address("x", x, x.dtype, (num_tokens, num_channels), strided_rows=True),
        address("grad", grad, x.dtype, (num_tokens, num_channels), strided_rows=True),
        address("weight", weight32, torch.float32, (num_channels, width)),
        None if bias32 is None else address("bias", bias32, torch.float32, (num_channels,)),
        *(grad_x.data_ptr(), grad_weight.data_ptr(), grad_bias.data_ptr(), None),
        *(x.stride(0), grad.stride(0), ChunkTable.of(chunks), num_channels, width),
        *(x.dtype is torch.bfloat16, silu, 1 if x.numel() < _SMALL else torch.get_num_threads()),
    )
    place = ctypes.addressof(call)
    scratch = torch.empty(_library().convolution_backward_scratch(place) * call.num_threads, dtype=torch.uint8)
    call.scratch = scratch.data_ptr()
    _library().convolution_backward(place)
    return grad_x, grad_weight, grad_bias


class ChannelRun(ctypes.Structure):
    """Channels of a convolution whose inputs are neighbours. Mirror of `ChannelRun`."""

    _fields_ = [(name, c_int64) for name in ("channel", "column", "count")]


class _Call(ctypes.Structure):
    """Mirror of `ConvolutionCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "states", "out", "scratch")),
        ("x_token", c_int64),
        ("chunks", ChunkTable),
        ("runs", c_void_p),
        ("num_runs", c_int64),
        *((name, c_int32) for name in ("num_channels", "width", "half", "half_weights", "silu", "num_threads")),
    ]


class _BackwardCall(ctypes.Structure):
    """Mirror of `ConvolutionBackwardCall`."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("x", "grad", "weight", "bias", "grad_x", "grad_weight", "grad_bias", "scratch")
        ),
        *((name, c_int64) for name in ("x_token", "grad_token")),
        ("chunks", ChunkTable),
        *((name, c_int32) for name in ("num_channels", "width", "half", "silu", "num_threads")),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        convolution_scratch=(c_int64, c_void_p),
        convolution_run=(None, c_void_p),
        convolution_backward_scratch=(c_int64, c_void_p),
        convolution_backward=(None, c_void_p),
    )
