"""ctypes face of `sampling.cpp` and `truncation.cpp`. Callers ask `build.library()` first: here it is there."""

import ctypes
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build

CHUNK = 128
_SMALL = 1 << 15
"""Logits below which a second thread costs more than it brings."""


class Figures(NamedTuple):
    """What a row is normalised by, and one token of it."""

    maximum: Tensor
    """float32 [N]; NaN for a row that holds NaN or +inf, or nothing but -inf."""
    log_total: Tensor
    """float64 [N]."""
    tokens: Tensor
    """int64 [N]."""
    logprobs: Tensor
    """float32 [N], of `tokens`."""


class _Rows(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("is_bf16", c_int64),
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("temperature", "token", "maximum", "log_total", "logprob")),
        *((name, c_void_p) for name in ("uniform", "greedy", "mass", "grad", "grad_logits")),
        ("threads", c_int64),
    ]


class _Truncation(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "candidate")),
        ("threads", c_int64),
    ]


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor, greedy: Tensor) -> Figures:
    """One token per row of `logits` [N, V]; `temperatures` float32, `uniforms` float64, `greedy` bool, all [N]."""
    logits = _readable(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    args, figures = _rows(logits, temperatures, tokens)
    mass = torch.empty(args.threads, -(-args.vocab_size // CHUNK), dtype=torch.float64)
    args.uniform, args.greedy, args.mass = uniforms.data_ptr(), greedy.data_ptr(), mass.data_ptr()
    build.library().sampling_draw(ctypes.byref(args))
    return figures


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Figures:
    """Figures of given `tokens`, int64 [N]."""
    args, figures = _rows(logits := _readable(logits), temperatures, tokens.contiguous())
    build.library().sampling_score(ctypes.byref(args))
    return figures


def gradient(logits: Tensor, temperatures: Tensor, figures: Figures, grad: Tensor) -> Tensor:
    """Gradient [N, V] of the log-probs with respect to `logits`, in their dtype, times `grad` float32 [N]."""
    args, _ = _rows(readable := _readable(logits), temperatures, figures.tokens)
    grad, result = grad.contiguous(), torch.empty(readable.shape, dtype=readable.dtype)
    args.maximum, args.log_total = figures.maximum.data_ptr(), figures.log_total.data_ptr()
    args.grad, args.grad_logits = grad.data_ptr(), result.data_ptr()
    build.library().sampling_gradient(ctypes.byref(args))
    return result.to(logits.dtype)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`kernels.rng.uniforms`."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    result = torch.empty(len(seeds), dtype=torch.float64)
    pointers = (c_void_p(x.data_ptr()) for x in (seeds, positions))
    build.library().sampling_uniforms(*pointers, c_int64(len(seeds)), c_void_p(result.data_ptr()))
    return result


def cut_tail(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """`model.sampling_masks.cut_tail`: -inf in place; `logits` float32 [n, V] with unit column stride."""
    n, vocab_size = logits.shape
    threads = _threads(n, vocab_size)
    columns = [column.contiguous() for column in (temperature, top_k, top_p, min_p)]
    candidate = torch.empty(threads, vocab_size)
    pointers = (x.data_ptr() for x in (*columns, candidate))
    args = _Truncation(logits.data_ptr(), n, vocab_size, logits.stride(0), *pointers, threads)
    build.library().truncation_cut(ctypes.byref(args))


def _rows(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> tuple[_Rows, Figures]:
    n, vocab_size = logits.shape
    maximum, logprobs, log_total = torch.empty(n), torch.empty(n), torch.empty(n, dtype=torch.float64)
    args = _Rows(
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        n,
        vocab_size,
        logits.stride(0),
        temperatures.data_ptr(),
        tokens.data_ptr(),
        maximum.data_ptr(),
        log_total.data_ptr(),
        logprobs.data_ptr(),
        threads=_threads(n, vocab_size),
    )
    return args, Figures(maximum, log_total, tokens, logprobs)


def _readable(logits: Tensor) -> Tensor:
    """float32 or bfloat16, neighbours in a row side by side."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _threads(n: int, vocab_size: int) -> int:
    return 1 if n * vocab_size < _SMALL else min(n, torch.get_num_threads())
