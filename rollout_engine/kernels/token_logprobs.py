"""Log-probs of tokens: one implementation for the sampler, `score()` and the trainer, so that they agree bit for bit.

A row's arithmetic does not depend on the other rows, its place among them, or the number of threads:

    weight  = exp((logit - max) / temperature)         float32
    total   = sum of chunk sums, left to right         float32 within a chunk of 128, float64 across chunks
    logprob = (logit - max) / temperature - log total  float64, rounded to float32 once

Subtracting the maximum before the division keeps every temperature finite. There is never a float32 copy of all logits:
the C++ kernel stores nothing of a row's size; its eager twin below works in blocks of rows that stay in the cache.
"""

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_engine.kernels.cpu import build, sampling
from rollout_engine.kernels.cpu.arguments import argument_error, check_ids, is_integral
from rollout_engine.kernels.row_stats import CHUNK, RowStats

RowStatsKernel = Callable[[Tensor, Tensor, Tensor], RowStats]
_BLOCK_NUMEL = 1 << 19
_DEVICE_BLOCK_NUMEL = 1 << 26
"""Larger on devices, because a launch costs more than a cache saves."""
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: float | Tensor = 1.0, kernel: RowStatsKernel | None = None
) -> Tensor:
    """log_softmax(logits / temperature) at `token_ids` -> float32 [N], differentiable with respect to the logits.

    `logits` [N, V] of any floating dtype, `token_ids` integers [N], `temperature` a number or [N]; 0 counts as 1.
    A row that holds NaN or +inf, or nothing but -inf, gives NaN. `kernel` replaces `row_stats`.
    Raises `ValueError` for ids outside [0, V), a temperature below 0, and other shapes and dtypes.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise argument_error("logits", logits, "a tensor of floats [N, V]")
    if not isinstance(token_ids, Tensor) or token_ids.shape != logits.shape[:1] or not is_integral(token_ids):
        raise argument_error(
            "token_ids", token_ids, f"a tensor of integers [{len(logits)}], one for each row of logits"
        )
    check_temperature(temperature, len(logits))
    temperatures = row_temperatures(temperature, logits)
    logprobs: Tensor = _TokenLogprobs.apply(logits, token_ids.long(), temperatures, kernel or row_stats)
    return logprobs


def check_temperature(temperature: float | Tensor, num_rows: int) -> None:
    """Raise `ValueError` unless `temperature` is a number or a tensor [num_rows], >= 0 as far as it is on the CPU."""
    given = torch.as_tensor(temperature) if isinstance(temperature, Real | Tensor) else None
    if given is None or given.shape not in ((), (1,), (num_rows,)) or given.is_complex() or given.is_meta:
        raise argument_error("temperature", temperature, f"a number, or a tensor [{num_rows}]")
    if given.is_cpu and not bool((given >= 0).all()):  # values on a device are not read: that would wait for it
        raise ValueError(f"temperature should be >= 0, and its lowest is {float(given.min())}.")


def row_temperatures(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """`temperature` as float32 [N], within float32's normal range; 0 (greedy) becomes 1."""
    if isinstance(temperature, Tensor):
        given = temperature.to(logits.device, torch.float64)
    else:  # filled on the device: a copy of a number to a device would wait for it
        given = torch.full((), temperature, dtype=torch.float64, device=logits.device)
    given = given.expand(logits.shape[0])
    return torch.where(given == 0, 1.0, given).clamp(_TINY, _HUGE).float()


def row_stats(logits: Tensor, temperatures: Tensor, token_ids: Tensor) -> RowStats:
    """Statistics of every row of `logits` [N, V], with the log-prob of its token in `token_ids` int64 [N]."""
    if logits.is_cpu and build.load_kernels() is not None:
        return sampling.score(logits, temperatures, token_ids)
    if logits.is_cpu:  # values on a device are not read: that would wait for it
        check_ids("token_ids", token_ids, logits.shape[1], of="the vocabulary of these logits")
    maximum = torch.empty_like(temperatures)
    total = torch.empty_like(temperatures, dtype=torch.float64)
    for block in row_blocks(logits):
        weights, maximum[block] = row_weights(logits[block], temperatures[block])
        total[block] = cumulative_mass(weights)[:, -1]
    maximum, log_total = maximum.where(total > 0, torch.nan), total.log()
    chosen = logits.gather(-1, token_ids[:, None])[:, 0]
    return RowStats(maximum, log_total, token_ids, logprobs_at(chosen, maximum, temperatures, log_total))


def row_blocks(logits: Tensor, device_numel: int = _DEVICE_BLOCK_NUMEL) -> Iterator[slice]:
    """Consecutive blocks of rows; on the CPU small enough for the cache, on devices of `device_numel` logits."""
    rows = max(1, (_BLOCK_NUMEL if logits.is_cpu else device_numel) // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def row_weights(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities of one block: (weights float32 [n, K, CHUNK], zeros past V; maximum float32 [n])."""
    n, vocab_size = logits.shape
    weights = torch.empty(n, -(-vocab_size // CHUNK) * CHUNK, device=logits.device)
    weights[:, :vocab_size] = logits
    weights[:, vocab_size:] = -torch.inf
    maximum = weights.amax(-1)
    return weights.sub_(maximum[:, None]).div_(temperatures[:, None]).exp_().view(n, -1, CHUNK), maximum


def cumulative_mass(weights: Tensor) -> Tensor:
    """Cumulative weight of chunks: weights [n, K, CHUNK] -> float64 [n, K], whose last column is the total."""
    return weights.sum(-1).double().cumsum(-1)


def logprobs_at(logits: Tensor, maximum: Tensor, temperatures: Tensor, log_total: Tensor) -> Tensor:
    """float32 log-probs of chosen logits (any dtype), given their rows' float32, float32 and float64 statistics."""
    return (((logits.float() - maximum) / temperatures).double() - log_total).float()


class _TokenLogprobs(torch.autograd.Function):
    """Backward: (onehot - softmax) / temperature * grad, in float32, with weights recomputed block by block."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperatures: Tensor, kernel: RowStatsKernel) -> Tensor:
        stats = kernel(logits, temperatures, token_ids)
        ctx.save_for_backward(logits, temperatures, *stats)
        return stats.logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, temperatures, *saved = ctx.saved_tensors
        stats = RowStats(*saved)
        if logits.is_cpu and build.load_kernels() is not None:
            return sampling.gradient(logits, temperatures, stats, grad), None, None, None
        scale = grad / temperatures
        shrink = -scale / stats.log_total.exp().float()
        grad_logits = torch.empty_like(logits)
        for block in row_blocks(logits):
            weights, _ = row_weights(logits[block], temperatures[block])
            flat = weights.flatten(1).mul_(shrink[block, None])
            flat.scatter_add_(-1, stats.tokens[block, None], scale[block, None])
            grad_logits[block] = flat[:, : logits.shape[1]]
        return grad_logits, None, None, None
