"""Device functions of all attention kernels: products, soft caps, and merging two parts of one softmax.

Scores are in units of log2, so that a weight is one exp2. A part of a softmax is (top, total, acc): its largest score,
the sum of 2^(score - top), and the sum of values with these weights (Milakov and Gimelshein 2018).
"""

import triton
import triton.language as tl

from rollout_engine.kernels.triton.rounding import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)
"""`top` of an empty part. It is finite so that differences are numbers; merging an empty part changes no bit."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32."""
    if INTERPRETED:  # the interpreter multiplies bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh without overflow."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    magnitude = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def merge_factors(top, other_top):
    """The top of two merged parts, and the factor for each part's `total` and `acc`."""
    both = tl.maximum(top, other_top)
    return both, tl.exp2(top - both), tl.exp2(other_top - both)
