"""ctypes face of `sampling.cpp`. Callers ask `build.load_kernels()` first: here it is there."""

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


class Truncation(NamedTuple):
    """Columns of N rows. Rules apply in this order, in float64, to tokens sorted by (logit, then id)."""

    temperature: Tensor
    """float64, > 0: every rule reads exp(logit / temperature)."""
    top_k: Tensor
    """int64: keep the k most likely tokens; 0 keeps all."""
    top_p: Tensor
    """float64: of these, the shortest sorted prefix whose share of their mass reaches it; 1 cuts none."""
    min_p: Tensor
    """float64: of these, tokens at least so many times as likely as the most likely one."""

    def rows(self, index: slice | Tensor) -> "Truncation":
        return Truncation(*(column[index] for column in self))


class Kept(NamedTuple):
    """What truncation leaves of N rows: tokens above `floor`, and those equal to it with ids up to `last_tie`."""

    log_total: Tensor
    """float64 [N], of the tokens that stay, under the row's own maximum."""
    floor: Tensor
    """float32 [N]."""
    last_tie: Tensor
    """int64 [N]."""


class _Rows(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("is_bf16", c_int64),
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("temperature", "token", "maximum", "log_total", "logprob")),
        *((name, c_void_p) for name in ("uniform", "greedy", "mass")),
        *((name, c_void_p) for name in ("temperature64", "top_k", "top_p", "min_p", "candidate")),
        *((name, c_void_p) for name in ("kept_log_total", "floor", "last_tie", "grad", "grad_logits")),
        ("threads", c_int64),
    ]


def draw(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, greedy: Tensor, rules: Truncation | None
) -> tuple[Figures, Kept | None]:
    """`kernels.draw.draw`."""
    logits = _readable(logits)
    n, vocab_size = logits.shape
    args, figures = _rows(logits, temperatures, torch.empty(n, dtype=torch.int64))
    mass = torch.empty(args.threads, -(-vocab_size // CHUNK), dtype=torch.float64)
    args.uniform, args.greedy, args.mass = uniforms.data_ptr(), greedy.data_ptr(), mass.data_ptr()
    kept = None
    if rules is not None:
        rules = Truncation(*(column.contiguous() for column in rules))
        args.temperature64, args.top_k, args.top_p, args.min_p = (column.data_ptr() for column in rules)
        candidate = torch.empty(args.threads, vocab_size)
        kept = Kept(torch.empty_like(figures.log_total), torch.empty(n), torch.empty(n, dtype=torch.int64))
        args.candidate = candidate.data_ptr()
        args.kept_log_total, args.floor, args.last_tie = (column.data_ptr() for column in kept)
    build.load_kernels().sampling_draw(ctypes.byref(args))
    return figures, kept


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Figures:
    """Figures of given `tokens`, int64 [N]."""
    args, figures = _rows(logits := _readable(logits), temperatures, tokens.contiguous())
    build.load_kernels().sampling_score(ctypes.byref(args))
    return figures


def gradient(logits: Tensor, temperatures: Tensor, figures: Figures, grad: Tensor) -> Tensor:
    """Gradient [N, V] of the log-probs with respect to `logits`, in their dtype, times `grad` float32 [N]."""
    args, _ = _rows(readable := _readable(logits), temperatures, figures.tokens)
    grad, result = grad.contiguous(), torch.empty(readable.shape, dtype=readable.dtype)
    args.maximum, args.log_total = figures.maximum.data_ptr(), figures.log_total.data_ptr()
    args.grad, args.grad_logits = grad.data_ptr(), result.data_ptr()
    build.load_kernels().sampling_gradient(ctypes.byref(args))
    return result.to(logits.dtype)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`kernels.rng.uniforms`."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    result = torch.empty(len(seeds), dtype=torch.float64)
    pointers = (c_void_p(x.data_ptr()) for x in (seeds, positions))
    build.load_kernels().sampling_uniforms(*pointers, c_int64(len(seeds)), c_void_p(result.data_ptr()))
    return result


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
