"""Entropies of rows of logits on a device. Twin: `kernels.entropy.row_figures`.

One program computes a row, in float64, with tiles of a fixed size from its first token to its last: no result depends
on the other rows. It differs from the twin by the order of sums alone, far below the last bit of a float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.entropy import figures_of

_BLOCK = 1024
"""Tokens of a tile. It is fixed, as another tile could sum in another order."""
_LOWEST = tl.constexpr(-708.0)


def row_figures(logits: Tensor, rows: Tensor, temperatures: Tensor) -> Tensor:
    """Maximum, log total and entropy of `rows` int64 [n] of `logits` [N, V] -> float64 [n, 3].

    `logits` are bfloat16, float16 or float32, with any stride between rows; `temperatures` float32 [n].
    """
    if logits.stride(1) != 1:
        raise ValueError(f"Rows of logits should be contiguous, got strides {logits.stride()}.")
    sums = torch.empty(4, len(rows), dtype=torch.float64, device=logits.device)
    if len(rows):
        sizes = logits.stride(0), logits.shape[1], len(rows)
        _sums_kernel[(len(rows),)](logits, rows, temperatures, sums, *sizes, BLOCK=_BLOCK, num_warps=8)
    return figures_of(*sums)


@triton.jit(do_not_specialize=["num_rows"])
def _sums_kernel(logits_ptr, rows_ptr, temperatures_ptr, sums_ptr, stride, vocab_size, num_rows, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    logits_ptr += tl.load(rows_ptr + index) * stride
    inverse = 1.0 / tl.load(temperatures_ptr + index).to(tl.float64)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        top = tl.maximum(top, _tile(logits_ptr, start, vocab_size, BLOCK))  # ignores NaN, which the sums show
    maximum = tl.max(top).to(tl.float64)
    ties = tl.full([BLOCK], 0.0, tl.float64)
    rest = tl.full([BLOCK], 0.0, tl.float64)
    weighted = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        depth = (_tile(logits_ptr, start, vocab_size, BLOCK).to(tl.float64) - maximum) * inverse
        depth = tl.where(depth < _LOWEST, _LOWEST, depth)  # NaN stays
        weight = tl.exp(depth)
        ties += tl.where(depth == 0.0, 1.0, 0.0)
        rest += tl.where(depth == 0.0, 0.0, weight)
        weighted -= weight * depth
    tl.store(sums_ptr + index, maximum)
    tl.store(sums_ptr + num_rows + index, tl.sum(ties))
    tl.store(sums_ptr + 2 * num_rows + index, tl.sum(rest))
    tl.store(sums_ptr + 3 * num_rows + index, tl.sum(weighted))


@triton.jit
def _tile(logits_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """float32 [BLOCK], -inf past the end of the row."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
