"""Rounding of float32 results to the dtype of a tensor: nearest, ties to even."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels: it truncates to bfloat16 and multiplies bfloat16 matrices wrongly."""


def compiles_kernels() -> bool:
    """Whether kernels are compiled for a device at their first launch, which takes seconds."""
    return not INTERPRETED.value


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 `x` in `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` rounded to `dtype` and back."""
    return narrow(x, dtype).to(tl.float32)
