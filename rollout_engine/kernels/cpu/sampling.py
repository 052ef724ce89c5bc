"""ctypes wrapper of `sampling.cpp`. Callers check that `build.load_kernels()` is not None."""

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, check_ids
from rollout_engine.kernels.row_stats import CHUNK, KeptTokens, RowStats, TokenMasks, Truncation

_SMALL = 1 << 15
"""Number of logits below which a second thread does not pay."""


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
        *((name, c_void_p) for name in ("kept_log_total", "floor", "last_tie", "mask")),
        ("mask_words", c_int64),
        *((name, c_void_p) for name in ("mask_row", "masked", "grad", "grad_logits")),
        ("threads", c_int64),
    ]


def draw(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    greedy: Tensor,
    rules: Truncation | None,
    masks: TokenMasks | None = None,
) -> tuple[RowStats, KeptTokens | None]:
    """C++ side of `kernels.draw.draw`. Raises `ValueError` for tensors it cannot read."""
    logits = _readable(logits)
    n, vocab_size = logits.shape
    args, stats = _rows(logits, temperatures, torch.empty(n, dtype=torch.int64))
    mass = torch.empty(args.threads, -(-vocab_size // CHUNK), dtype=torch.float64)
    args.uniform = address("uniforms", uniforms, torch.float64, (n,))
    args.greedy = address("greedy", greedy, torch.bool, (n,))
    args.mass = mass.data_ptr()
    kept = None if rules is None and masks is None else KeptTokens.empty(n)
    if kept is not None:
        args.kept_log_total, args.floor, args.last_tie = (column.data_ptr() for column in kept)
    if rules is not None:
        rules = Truncation(*(column.contiguous() for column in rules))
        args.temperature64, args.top_k, args.top_p, args.min_p = _rule_addresses(rules, n)
        scratch = torch.empty(1 if masks is None else 2, args.threads, vocab_size)
        args.candidate, args.masked = scratch[0].data_ptr(), scratch[-1].data_ptr()
    if masks is not None:
        args.mask, args.mask_row = _mask_addresses(masks, n, vocab_size)
        args.mask_words = masks.bits.shape[1]
    _library().sampling_draw(ctypes.addressof(args))
    return stats, kept


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> RowStats:
    """Statistics of every row, with the log-prob of its given token; `tokens` int64 [N].

    Raises `ValueError` for tensors it cannot read.
    """
    logits = _readable(logits)
    args, stats = _rows(logits, temperatures, tokens.contiguous())
    check_ids("token_ids", tokens, logits.shape[1], of="the vocabulary of these logits")
    _library().sampling_score(ctypes.addressof(args))
    return stats


def gradient(logits: Tensor, temperatures: Tensor, stats: RowStats, grad: Tensor) -> Tensor:
    """Gradient [N, V] of the log-probs with respect to `logits`, in their dtype, times `grad` float32 [N].

    Raises `ValueError` for tensors it cannot read.
    """
    readable = _readable(logits)
    args, _ = _rows(readable, temperatures, stats.tokens)
    grad, result = grad.contiguous(), torch.empty(readable.shape, dtype=readable.dtype)
    rows = readable.shape[:1]
    args.maximum = address("stats.maximum", stats.maximum, torch.float32, rows)
    args.log_total = address("stats.log_total", stats.log_total, torch.float64, rows)
    args.grad, args.grad_logits = address("grad", grad, torch.float32, rows), result.data_ptr()
    _library().sampling_gradient(ctypes.addressof(args))
    return result.to(logits.dtype)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """C++ side of `kernels.rng.uniforms`. Raises `ValueError` for tensors it cannot read."""
    if not isinstance(seeds, Tensor) or seeds.dim() != 1:
        raise argument_error("seeds", seeds, "a tensor of one dimension")
    count = len(seeds)
    seeds, positions = seeds.contiguous(), positions.contiguous()  # alive until the call has read them
    result = torch.empty(count, dtype=torch.float64)
    keys = address("seeds", seeds, torch.int64, (count,))
    counters = address("positions", positions, torch.int64, (count,))
    _library().sampling_uniforms(keys, counters, count, result.data_ptr())
    return result


def _rows(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> tuple[_Rows, RowStats]:
    n, vocab_size = logits.shape
    if vocab_size == 0:
        raise argument_error("logits", logits, "of at least one token")
    maximum, logprobs, log_total = torch.empty(n), torch.empty(n), torch.empty(n, dtype=torch.float64)
    args = _Rows(
        address("logits", logits, logits.dtype, logits.shape, strided_rows=True),
        logits.dtype == torch.bfloat16,
        n,
        vocab_size,
        logits.stride(0),
        address("temperatures", temperatures, torch.float32, (n,)),
        address("token_ids", tokens, torch.int64, (n,)),
        maximum.data_ptr(),
        log_total.data_ptr(),
        logprobs.data_ptr(),
        threads=1 if n * vocab_size < _SMALL else min(n, torch.get_num_threads()),
    )
    return args, RowStats(maximum, log_total, tokens, logprobs)


def _rule_addresses(rules: Truncation, n: int) -> list[int]:
    named = zip(("temperature", "top_k", "top_p", "min_p"), rules, strict=True)
    dtypes = {"top_k": torch.int64}
    addresses = [address(f"rules.{name}", x, dtypes.get(name, torch.float64), (n,)) for name, x in named]
    if not bool((rules.temperature > 0).all()):  # it scales the bins that tokens are sorted into
        raise ValueError(f"rules.temperature should be above 0, and its lowest is {float(rules.temperature.min())}.")
    return addresses


def _mask_addresses(masks: TokenMasks, n: int, vocab_size: int) -> tuple[int, int]:
    bits, places = masks
    if not isinstance(bits, Tensor) or bits.dim() != 2 or bits.shape[1] * 32 < vocab_size:
        raise argument_error("masks.bits", bits, f"an int32 tensor [M, W] with at least {vocab_size} bits in a row")
    found = (
        address("masks.bits", bits, torch.int32, tuple(bits.shape)),
        address("masks.places", places, torch.int64, (n,)),
    )
    if n and int(places.max()) >= len(bits):
        raise ValueError(f"masks.places should be below {len(bits)}, and its highest is {int(places.max())}.")
    return found


def _readable(logits: Tensor) -> Tensor:
    """`logits` as float32 or bfloat16 [N, V] with contiguous rows."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise argument_error("logits", logits, "a tensor of floats [N, V]")
    if logits.dtype not in DTYPES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        sampling_draw=(None, c_void_p),
        sampling_score=(None, c_void_p),
        sampling_gradient=(None, c_void_p),
        sampling_uniforms=(None, c_void_p, c_void_p, c_int64, c_void_p),
    )
