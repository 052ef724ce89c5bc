"""Gradients of a trainer's attention in C++ (`attention_backward.cpp`); eager twin: `kernels.dense_attention`."""

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import address, argument_error, check_floats
from rollout_engine.kernels.cpu.attention import are_latents, num_parts


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    params: AttentionParams,
    lengths: Sequence[int] | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [B, H, T, Dk], k [B, Hk, T, Dk] and v [B, Hk, T, Dv], float32, of their shapes.

    `out` and its gradient `grad` [B, T, H, Dv], `lse` float32 [B, T, H]; `lengths` and `reach` as in
    `DenseAttention`. Raises `ValueError` for tensors that the kernel cannot read.
    """
    if are_latents(k, v) and (parts := num_parts(q.shape[1])) > 1:  # an item is one KV head: many threads need many
        k, v = (x.expand(-1, parts, -1, -1) for x in (k, v))
        grad_q, *others = attention_gradients(q, k, v, out, lse, grad, params, lengths, reach)
        grad_k, grad_v = (x.sum(1, keepdim=True) for x in others)
        return grad_q, grad_k, grad_v
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("grad", grad)):
        check_floats(name, x, num_dims=4)
    (batch, num_heads, length, dim_k), num_kv_heads, dim_v = q.shape, k.shape[1], v.shape[-1]
    if not num_kv_heads or num_heads % num_kv_heads or not num_heads:
        raise argument_error("q", q, f"of a multiple of {num_kv_heads} heads, the keys'")
    lengths = [length] * batch if lengths is None else lengths
    num_tokens, dtype = batch * length, q.dtype
    starts = torch.tensor(list(itertools.accumulate(lengths, initial=0)))
    if min(lengths, default=0) < 0 or starts[-1] != num_tokens:
        raise ValueError(f"lengths should add up to {num_tokens} tokens, those of q, and are {list(lengths)}.")
    by_token = [_rows(x) for x in (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out, grad)]
    shapes = [(num_heads, dim_k), (num_kv_heads, dim_k), (num_kv_heads, dim_v), (num_heads, dim_v), (num_heads, dim_v)]
    call = _Call()
    for name, rows, shape in zip(("q", "k", "v", "out", "grad"), by_token, shapes, strict=True):
        setattr(call, name, address(name, rows, dtype, (num_tokens, *shape), strided_rows=True))
        setattr(call, f"{name}_token", rows.stride(0))
        setattr(call, f"{name}_head", rows.stride(1))
    lse = lse.contiguous()
    call.lse = address("lse", lse, torch.float32, (batch, length, num_heads))
    call.reach = None if reach is None else address("reach", reach, torch.int32, (batch, length))
    found = [torch.zeros(num_tokens, *shape) for shape in shapes[:3]]
    call.grad_q, call.grad_k, call.grad_v = (x.data_ptr() for x in found)
    call.starts, call.num_sequences, call.num_threads = starts.data_ptr(), len(lengths), torch.get_num_threads()
    call.num_heads, call.num_kv_heads, call.dk, call.dv = num_heads, num_kv_heads, dim_k, dim_v
    call.half = dtype == torch.bfloat16
    call.scale, call.sliding_window, call.softcap = params
    place = ctypes.addressof(call)
    scratch = torch.empty(call.num_threads * _library().attention_backward_scratch(place), dtype=torch.uint8)
    call.scratch = scratch.data_ptr()
    _library().attention_backward(place)
    grad_q, grad_k, grad_v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in found)
    return grad_q, grad_k, grad_v


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [B * T, H, D] with dense channels."""
    flat = x.flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


class _Call(ctypes.Structure):
    """Mirror of `AttentionBackwardCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("starts", "q", "k", "v", "out", "grad", "lse", "reach")),
        *((name, c_void_p) for name in ("grad_q", "grad_k", "grad_v", "scratch")),
        *((f"{name}_{stride}", c_int64) for name in ("q", "k", "v", "out", "grad") for stride in ("token", "head")),
        *((name, c_int32) for name in ("num_sequences", "num_heads", "num_kv_heads", "dk", "dv", "half")),
        *((name, c_int32) for name in ("num_threads", "sliding_window")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.declared(attention_backward=(None, c_void_p), attention_backward_scratch=(c_int64, c_void_p))
