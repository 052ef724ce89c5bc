"""A router's choice: the k most probable experts of each token, and their weights. Twin: `model.modules.experts`.

    logits ── softmax in float32 ── the k largest; of equal ones those of the lowest numbers ── their weights

They are written in the order of the experts' numbers, in which a token's outputs are added. A row has the same bits in
any batch.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import narrow
from rollout_engine.kernels.triton.tiling import next_power_of_2


class Routes(NamedTuple):
    """Experts given to one layer's router, and memory for the experts that it uses; both in the router's own order."""

    given: Tensor | None
    """int32 [T, k], experts to use, whose rows may lie apart; -1 in the first place: the router's own choice."""
    kept: Tensor | None
    """uint8 or int16 [slots, k], whose rows may lie apart: written, from the largest to the smallest."""
    slots: Tensor
    """int64 [T], the row of `kept` for each token; -1: none."""


def choose(
    logits: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    normalised: bool,
    probabilities: Tensor | None = None,
    routes: Routes | None = None,
) -> None:
    """Write the experts int32 [T, k] that logits [T, E] choose, ascending, and their `weights` [T, k].

    Args:
        logits: any floating dtype, rows contiguous.
        weights: the experts' probabilities, rounded to its dtype.
        experts: their numbers.
        normalised: whether the weights are divided by their sum, added from the largest to the smallest, or in the
            order of the experts that `routes` gives.
        probabilities: float32 [T, E], written too if given.
        routes: choices to use instead, and memory for the choices made.
    """
    (num_rows, num_experts), top_k = logits.shape, experts.shape[1]
    if not (logits.stride(1) == 1 and weights.is_contiguous() and experts.is_contiguous()):
        raise ValueError(f"Rows of logits should be contiguous, got strides {logits.stride()}; so should all results.")
    if not 0 < top_k <= num_experts:
        raise ValueError(f"Expected 1 to {num_experts} experts of a token, got {top_k}.")
    if not num_rows:
        return
    given, kept, slots = routes or (None, None, experts)
    block = next_power_of_2(num_experts)
    written = [weights if each is None else each for each in (probabilities, given, kept)]
    strides = [0 if each is None else each.stride(0) for each in (given, kept)]
    _choose.launch(
        (num_rows,),
        (logits, weights, experts, *written, slots),
        (),
        (
            *(logits.stride(0), *strides, num_experts, top_k, normalised),
            *(each is not None for each in (probabilities, given, kept)),
            block,
        ),
        num_warps=1 if block <= 256 else 4,
    )


@triton.jit
def _choose_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    probabilities_ptr,
    given_ptr,
    kept_ptr,
    slots_ptr,
    stride,
    given_stride,
    kept_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    KEEPS_PROBABILITIES: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    KEEPS_CHOICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    power = tl.exp(logits - tl.max(logits))
    probability = tl.div_rn(power, tl.zeros_like(power) + tl.sum(power))
    if KEEPS_PROBABILITIES:
        tl.store(probabilities_ptr + row * NUM_EXPERTS + expert, probability, mask=inside)
    # Numbers that are not negative are in the order of their bits. NaN is above all, so experts that exist are chosen.
    left = tl.where(inside, probability.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    chosen = expert < 0
    total = 0.0
    given = given_ptr + row * given_stride
    if KEEPS_CHOICE:
        slot = tl.load(slots_ptr + row)
    for place in tl.static_range(TOP_K):
        largest = tl.min(tl.where(left == tl.max(left), expert, BLOCK))
        if IS_GIVEN:
            largest = tl.where(tl.load(given) >= 0, tl.load(given + place), largest)
        if KEEPS_CHOICE:
            kept = kept_ptr + slot * kept_stride + place
            tl.store(kept, largest.to(kept_ptr.dtype.element_ty), mask=slot >= 0)
        is_it = expert == largest
        total += tl.sum(tl.where(is_it, probability, 0.0))
        chosen = chosen | is_it
        left = tl.where(is_it, -1, left)
    weight = probability
    if NORMALISED:
        weight = tl.div_rn(probability, tl.zeros_like(probability) + total)
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32)) - 1
    tl.store(weights_ptr + place, narrow(weight, weights_ptr.dtype.element_ty), mask=chosen)
    tl.store(experts_ptr + place, expert, mask=chosen)


_choose = Launcher(_choose_kernel, enable_fp_fusion=False)
