"""ctypes wrapper of `latent.cpp`. Callers ask `supports` first."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, check_floats
from rollout_engine.kernels.cpu.gemm import PANEL, PackedWeight, addresses


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are available for these tensors: both float32, or both bfloat16, on the CPU."""
    same = x.is_cpu and weight.is_cpu and x.dtype is weight.dtype
    return same and x.dtype in DTYPES and build.load_kernels() is not None


def absorb(q: Tensor, weight: Tensor, nope: int) -> Tensor:
    """C++ side of `kernels.latent.absorb`. Raises `ValueError` for tensors that it cannot read."""
    rope = q.shape[-1] - nope
    call = _call(q, weight, q.shape[-1])
    call.nope, call.rope, call.value = nope, rope, weight.shape[1] - nope
    out = q.new_empty(*q.shape[:2], weight.shape[2] + rope)
    call.out = out.data_ptr()
    _library().latent_absorb(ctypes.addressof(call))
    return out


def expand(x: Tensor, weight: Tensor, nope: int) -> Tensor:
    """C++ side of `kernels.latent.expand`. Raises `ValueError` for tensors that it cannot read."""
    call = _call(x, weight, weight.shape[2])
    call.nope, call.value = nope, weight.shape[1] - nope
    out = x.new_empty(*x.shape[:2], call.value)
    call.out = out.data_ptr()
    _library().latent_expand(ctypes.addressof(call))
    return out


def multiply_heads(x: Tensor, packed: PackedWeight, width: int, *, tail: int = 0) -> Tensor:
    """x [T, H, K + tail] by a matrix [`width`, K] of each head -> [T, H, width + tail]; the tail is copied.

    `packed`: the matrices one below the other, each filled up with zeros to whole panels. Raises `ValueError` for
    tensors that it cannot read.
    """
    check_floats("x", x, num_dims=3)
    num_tokens, num_heads, size = x.shape
    if x.dtype is not packed.dtype or packed.scales is not None or size - tail != packed.in_features:
        raise argument_error("x", x, f"{packed.dtype} [T, H, {packed.in_features + tail}] like the weight")
    if packed.out_features != num_heads * -(-width // PANEL) * PANEL:
        raise argument_error("packed", packed.panels, f"the panels of {num_heads} matrices of {width} rows")
    out = x.new_empty(num_tokens, num_heads, width + tail)
    call = _HeadsCall()
    call.x = address("x", x, x.dtype, (num_tokens, num_heads, size), strided_rows=True)
    call.packed, _ = addresses("packed", packed)
    call.out = out.data_ptr()
    call.x_token, call.x_head, _ = x.stride()
    call.num_tokens, call.num_heads, call.in_features, call.out_features = num_tokens, num_heads, size - tail, width
    call.tail, call.half, call.num_threads = tail, x.dtype == torch.bfloat16, torch.get_num_threads()
    staging = torch.empty(_library().latent_heads_staging(ctypes.addressof(call)), dtype=torch.uint8)
    call.staging = staging.data_ptr()
    _library().latent_multiply_heads(ctypes.addressof(call))
    return out


def _call(x: Tensor, weight: Tensor, width: int) -> "_Call":
    check_floats("x", x, num_dims=3)
    check_floats("weight", weight, num_dims=3)
    num_tokens, num_heads = x.shape[:2]
    call = _Call()
    call.x = address("x", x, x.dtype, (num_tokens, num_heads, width), strided_rows=True)
    call.weight = address("weight", weight, x.dtype, (num_heads, *weight.shape[1:]))
    call.x_token, call.x_head, _ = x.stride()
    call.num_tokens, call.num_heads, call.rank = num_tokens, num_heads, weight.shape[2]
    call.half, call.num_threads = x.dtype == torch.bfloat16, torch.get_num_threads()
    return call


class _Call(ctypes.Structure):
    """Mirror of `LatentCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "out")),
        *((name, c_int64) for name in ("x_token", "x_head")),
        *((name, c_int32) for name in ("num_tokens", "num_heads", "rank", "nope", "rope", "value")),
        *((name, c_int32) for name in ("half", "num_threads")),
    ]


class _HeadsCall(ctypes.Structure):
    """Mirror of `HeadsCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "packed", "out", "staging")),
        *((name, c_int64) for name in ("x_token", "x_head", "num_tokens", "in_features", "out_features", "tail")),
        *((name, c_int32) for name in ("num_heads", "half", "num_threads")),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        latent_absorb=(None, c_void_p),
        latent_expand=(None, c_void_p),
        latent_heads_staging=(c_int64, c_void_p),
        latent_multiply_heads=(None, c_void_p),
    )
