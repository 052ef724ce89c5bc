"""Entropies of rows of logits: one implementation for the sampler and the trainer, so that they agree bit for bit.

    x       = (logit - max) / temperature                                        float64
    entropy = log total + (sum of -x e^x) / total,  total = sum of e^x           float64, rounded to float32 once

in nats. The terms of tokens at the maximum are counted, not computed, so that log total keeps its digits if one token
has nearly all of the mass, and no term is below 0: an entropy is never negative, and 0 for a row with one token above
-inf. A row's arithmetic does not depend on the other rows or the number of threads. C++ holds nothing of a row's size;
its eager twin below works in blocks of rows.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu import entropy as compiled
from rollout_engine.kernels.cpu.arguments import argument_error
from rollout_engine.kernels.row_stats import CHUNK
from rollout_engine.kernels.token_logprobs import check_temperature, row_blocks, row_temperatures

FiguresKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes `row_figures`, on the logits' device."""
_DEVICE_BLOCK_NUMEL = 1 << 24
"""Logits of a block on a device: 128 MiB as float64."""
_LOWEST = -708.0
"""Lowest x; e^x is still a normal number, and nothing next to the smallest float32."""


def token_entropies(logits: Tensor, temperature: float | Tensor = 1.0, kernel: FiguresKernel | None = None) -> Tensor:
    """Entropies of softmax(logits / temperature) in nats -> float32 [N], differentiable with respect to the logits.

    `logits` [N, V] of any floating dtype, `temperature` a number or [N]; 0 counts as 1. A row that holds NaN or +inf,
    or nothing but -inf, gives NaN. `kernel` replaces `row_figures`. Raises `ValueError` for a temperature below 0, and
    for other shapes and dtypes.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise argument_error("logits", logits, "a tensor of floats [N, V]")
    check_temperature(temperature, len(logits))
    entropies: Tensor = _TokenEntropies.apply(logits, row_temperatures(temperature, logits), kernel or row_figures)
    return entropies


def row_figures(logits: Tensor, rows: Tensor, temperatures: Tensor) -> Tensor:
    """Maximum, log total and entropy of `rows` int64 [n] of `logits` [N, V] -> float64 [n, 3].

    `temperatures`: float32 [n], of these rows, from `row_temperatures`.
    """
    if logits.is_cpu and build.load_kernels() is not None:
        return compiled.figures(logits, rows, temperatures)
    found = torch.empty(len(rows), 3, dtype=torch.float64, device=logits.device)
    for block in row_blocks(logits, _DEVICE_BLOCK_NUMEL):
        some = rows[block]
        if len(some):
            found[block] = _block_figures(logits[some], temperatures[block])
    return found


def figures_of(maximum: Tensor, ties: Tensor, rest: Tensor, weighted: Tensor) -> Tensor:
    """Figures float64 [n, 3] of rows by their sums, float64 [n]; of a row whose sums are not finite NaN.

    `ties`: tokens at the maximum; `rest`: weights of the others; `weighted`: the sum of -x e^x.
    """
    if maximum.is_cpu:  # value by value: a vectorised log1p may give other bits at the end of a tensor
        pairs = zip(ties.tolist(), rest.tolist(), strict=True)
        logs = [math.log(m) + math.log1p(r / m) if m and r == r else math.nan for m, r in pairs]
        log_total = torch.tensor(logs, dtype=torch.float64)
    else:
        log_total = ties.log() + (rest / ties).log1p()
    found = torch.stack([maximum, log_total, log_total + weighted / (ties + rest)], 1)
    return found.where(found[:, 2:].isfinite(), torch.nan)


def _block_figures(logits: Tensor, temperatures: Tensor) -> Tensor:
    maximum = logits.float().amax(-1).double()
    depths = _depths(logits, maximum, temperatures)
    weights, is_top = depths.exp(), depths == 0
    ties = is_top.sum(-1).double()
    return figures_of(maximum, ties, _total(weights.masked_fill(is_top, 0.0)), _total(weights.mul_(depths)).neg())


def _depths(logits: Tensor, maximum: Tensor, temperatures: Tensor) -> Tensor:
    """(logit - maximum) / temperature, float64 [n, V]."""
    inverse = temperatures.double().reciprocal()
    return ((logits.double() - maximum[:, None]) * inverse[:, None]).clamp_(min=_LOWEST)


def _total(values: Tensor) -> Tensor:
    """Sums of rows, float64 [n, V] -> [n], in an order that does not depend on the number of rows."""
    count = -(-values.shape[1] // CHUNK)
    padded = torch.nn.functional.pad(values, [0, count * CHUNK - values.shape[1]])
    return padded.view(len(values), count, CHUNK).sum(-1).cumsum(-1)[:, -1]


class _TokenEntropies(torch.autograd.Function):
    """Backward: -p (log p + entropy) / temperature * grad, with weights recomputed block by block."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperatures: Tensor, kernel: FiguresKernel) -> Tensor:
        found = kernel(logits, torch.arange(len(logits), device=logits.device), temperatures)
        ctx.save_for_backward(logits, temperatures, found)
        return found[:, 2].float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, temperatures, found = ctx.saved_tensors
        if logits.is_cpu and build.load_kernels() is not None:
            return compiled.gradient(logits, temperatures, found, grad), None, None
        scale = -grad.double() / temperatures
        result = torch.empty_like(logits)
        for block in row_blocks(logits, _DEVICE_BLOCK_NUMEL):
            maximum, log_total, entropy = found[block].unbind(1)
            logprobs = _depths(logits[block], maximum, temperatures[block]) - log_total[:, None]
            slopes = logprobs.exp().mul_(logprobs + entropy[:, None]).mul_(scale[block, None])
            result[block] = slopes.to(logits.dtype)
        return result, None, None
