"""ctypes face of `sampling.cpp`. Callers ask `build.load_kernels()` first: here it is there."""

import ctypes
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import address, check_ids, refused, rows_address

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
    """`kernels.draw.draw`. Raises `ValueError` for what it cannot read."""
    logits = _readable(logits)
    n, vocab_size = logits.shape
    args, figures = _rows(logits, temperatures, torch.empty(n, dtype=torch.int64))
    mass = torch.empty(args.threads, -(-vocab_size // CHUNK), dtype=torch.float64)
    args.uniform = address("uniforms", uniforms, torch.float64, (n,))
    args.greedy = address("greedy", greedy, torch.bool, (n,))
    args.mass = mass.data_ptr()
    kept = None
    if rules is not None:
        rules = Truncation(*(column.contiguous() for column in rules))
        args.temperature64, args.top_k, args.top_p, args.min_p = _rule_addresses(rules, n)
        candidate = torch.empty(args.threads, vocab_size)
        kept = Kept(torch.empty_like(figures.log_total), torch.empty(n), torch.empty(n, dtype=torch.int64))
        args.candidate = candidate.data_ptr()
        args.kept_log_total, args.floor, args.last_tie = (column.data_ptr() for column in kept)
    build.load_kernels().sampling_draw(ctypes.byref(args))
    return figures, kept


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Figures:
    """Figures of given `tokens`, int64 [N]. Raises `ValueError` for what it cannot read."""
    logits = _readable(logits)
    args, figures = _rows(logits, temperatures, tokens.contiguous())
    check_ids("token_ids", tokens, logits.shape[1], of="the vocabulary of these logits")
    build.load_kernels().sampling_score(ctypes.byref(args))
    return figures


def gradient(logits: Tensor, temperatures: Tensor, figures: Figures, grad: Tensor) -> Tensor:
    """Gradient [N, V] of the log-probs with respect to `logits`, in their dtype, times `grad` float32 [N].

    Raises `ValueError` for what it cannot read.
    """
    readable = _readable(logits)
    args, _ = _rows(readable, temperatures, figures.tokens)
    grad, result = grad.contiguous(), torch.empty(readable.shape, dtype=readable.dtype)
    rows = readable.shape[:1]
    args.maximum = address("figures.maximum", figures.maximum, torch.float32, rows)
    args.log_total = address("figures.log_total", figures.log_total, torch.float64, rows)
    args.grad, args.grad_logits = address("grad", grad, torch.float32, rows), result.data_ptr()
    build.load_kernels().sampling_gradient(ctypes.byref(args))
    return result.to(logits.dtype)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`kernels.rng.uniforms`. Raises `ValueError` for what it cannot read."""
    if not isinstance(seeds, Tensor) or seeds.dim() != 1:
        raise refused("seeds", seeds, "a tensor of one dimension")
    seeds, positions = seeds.contiguous(), positions.contiguous()
    result = torch.empty(len(seeds), dtype=torch.float64)
    named = (("seeds", seeds), ("positions", positions))
    pointers = [c_void_p(address(name, column, torch.int64, seeds.shape)) for name, column in named]
    build.load_kernels().sampling_uniforms(*pointers, c_int64(len(seeds)), c_void_p(result.data_ptr()))
    return result


def _rows(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> tuple[_Rows, Figures]:
    n, vocab_size = logits.shape
    if vocab_size == 0:
        raise refused("logits", logits, "of at least one token")
    maximum, logprobs, log_total = torch.empty(n), torch.empty(n), torch.empty(n, dtype=torch.float64)
    args = _Rows(
        rows_address("logits", logits, logits.dtype, logits.shape),
        logits.dtype == torch.bfloat16,
        n,
        vocab_size,
        logits.stride(0),
        address("temperatures", temperatures, torch.float32, (n,)),
        address("token_ids", tokens, torch.int64, (n,)),
        maximum.data_ptr(),
        log_total.data_ptr(),
        logprobs.data_ptr(),
        threads=_threads(n, vocab_size),
    )
    return args, Figures(maximum, log_total, tokens, logprobs)


def _rule_addresses(rules: Truncation, n: int) -> list[int]:
    named = zip(("temperature", "top_k", "top_p", "min_p"), rules, strict=True)
    dtypes = {"top_k": torch.int64}
    addresses = [address(f"rules.{name}", x, dtypes.get(name, torch.float64), (n,)) for name, x in named]
    if not bool((rules.temperature > 0).all()):  # tokens are sorted into bins by it
        raise ValueError(f"rules.temperature should be above 0, and its lowest is {float(rules.temperature.min())}.")
    return addresses


def _readable(logits: Tensor) -> Tensor:
    """float32 or bfloat16 [N, V], neighbours in a row side by side."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise refused("logits", logits, "a tensor of floats [N, V]")
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _threads(n: int, vocab_size: int) -> int:
    return 1 if n * vocab_size < _SMALL else min(n, torch.get_num_threads())
