"""A router's choice: the k most wanted experts of each token, and their weights. Twin: `model.modules.experts`.

    logits ── softmax or sigmoid in float32 ──┬── + bias ── some groups' alone ── the k largest, by the lowest numbers
                                              └── those experts' scores ── shares of their sum ── times a factor

Weights are written in the order of the experts' numbers, in which a token's outputs are added. A row has the same bits
in any batch, and those that the eager twin computes from the kernel's scores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.routing_rule import RoutingRule
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import narrow
from rollout_engine.kernels.triton.tiling import next_power_of_2

_LOWEST = tl.constexpr(-(1 << 31))
"""Below every number's place in the order of `_order`."""
_NAN = tl.constexpr(0x7FFFFFFF)


class Routes(NamedTuple):
    """Experts given to one layer's router, and memory for the experts that it uses; both in the router's own order."""

    given: Tensor | None
    """int32 [T, k], experts to use, whose rows may lie apart; -1 in the first place: the router's own choice."""
    kept: Tensor | None
    """uint8 or int16 [slots, k], whose rows may lie apart: written, from the most wanted to the least."""
    slots: Tensor
    """int64 [T], the row of `kept` for each token; -1: none."""


def choose(
    logits: Tensor,
    weights: Tensor,
    experts: Tensor,
    rule: RoutingRule,
    *,
    bias: Tensor | None = None,
    scores: Tensor | None = None,
    routes: Routes | None = None,
) -> None:
    """Write the experts int32 [T, k] that logits [T, E] choose by `rule`, ascending, and their `weights` [T, k].

    Args:
        logits: any floating dtype, rows contiguous.
        weights: rounded to its dtype, whatever `rule.rounded` is.
        experts: their numbers.
        rule: its sum of weights is added from the most wanted to the least, or in the order that `routes` gives.
        bias: [E], added to scores for the choice alone.
        scores: float32 [T, E], written too if given.
        routes: choices to use instead, and memory for the choices made.
    """
    (num_rows, num_experts), top_k = logits.shape, experts.shape[1]
    if not (logits.stride(1) == 1 and weights.is_contiguous() and experts.is_contiguous()):
        raise ValueError(f"Rows of logits should be contiguous, got strides {logits.stride()}; so should all results.")
    groups = rule.groups
    num_allowed = num_experts if groups is None else num_experts // groups.num * groups.num_chosen
    if not 0 < top_k <= num_allowed or (groups is not None and num_experts % groups.num):
        raise ValueError(f"Expected 1 to {num_allowed} experts of a token, of {num_experts} by {rule}, got {top_k}.")
    if bias is not None and (bias.shape != (num_experts,) or bias.stride(0) != 1 or bias.dtype == torch.float64):
        raise ValueError(f"Expected a bias of {num_experts} numbers, not {bias.dtype} {list(bias.shape)}.")
    if not num_rows:
        return
    given, kept, slots = routes or (None, None, experts)
    block = next_power_of_2(num_experts)
    optional = bias, scores, given, kept
    _choose.launch(
        (num_rows,),
        (logits, weights, experts, *(weights if each is None else each for each in optional), slots),
        (),
        (
            *(logits.stride(0), *(0 if each is None else each.stride(0) for each in (given, kept))),
            *(num_experts, top_k, rule.sigmoid, *((0, 0, False) if groups is None else groups)),
            *(rule.normalised, rule.added, rule.least, rule.scaling),
            *(each is not None for each in optional),
            block,
        ),
        num_warps=1 if block <= 256 else 4,
    )


@triton.jit
def _choose_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    bias_ptr,
    scores_ptr,
    given_ptr,
    kept_ptr,
    slots_ptr,
    stride,
    given_stride,
    kept_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    NORMALISED: tl.constexpr,
    ADDED: tl.constexpr,
    LEAST: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_SCORES: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    KEEPS_CHOICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    score = _scores(logits, IS_SIGMOID)
    if KEEPS_SCORES:
        tl.store(scores_ptr + row * NUM_EXPERTS + expert, score, mask=inside)
    left = tl.where(inside, _order(_add_bias(score, bias_ptr + expert, inside, HAS_BIAS)), _LOWEST)
    if NUM_GROUPS:
        left = _of_chosen_groups(left, expert, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, NUM_CHOSEN, SUMS_TWO, BLOCK)
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
        total += tl.sum(tl.where(is_it, score, 0.0))
        chosen = chosen | is_it
        left = tl.where(is_it, _LOWEST, left)
    weight = _weights(score, total, NORMALISED, ADDED, LEAST, SCALING)
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32)) - 1
    tl.store(weights_ptr + place, narrow(weight, weights_ptr.dtype.element_ty), mask=chosen)
    tl.store(experts_ptr + place, expert, mask=chosen)


@triton.jit
def _scores(logits, IS_SIGMOID: tl.constexpr):
    """Sigmoids of a row's logits, or their softmax."""
    if IS_SIGMOID:
        one = tl.zeros_like(logits) + 1.0
        score = tl.div_rn(one, one + tl.exp(-logits))
    else:
        power = tl.exp(logits - tl.max(logits))
        score = tl.div_rn(power, tl.zeros_like(power) + tl.sum(power))
    return score


@triton.jit
def _add_bias(score, bias_ptrs, inside, HAS_BIAS: tl.constexpr):
    """Scores by which experts are chosen."""
    wanted = score
    if HAS_BIAS:
        wanted = score + tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
    return wanted


@triton.jit
def _weights(
    score, total, NORMALISED: tl.constexpr, ADDED: tl.constexpr, LEAST: tl.constexpr, SCALING: tl.constexpr
):  # fmt: skip
    """Weights of experts, of which those chosen have scores that add up to `total`."""
    weight = score
    if NORMALISED:
        if ADDED != 0.0:
            total += ADDED
        if LEAST != 0.0:
            total = tl.where(total < LEAST, LEAST, total)
        weight = tl.div_rn(score, tl.zeros_like(score) + total)
    if SCALING != 1.0:
        weight = weight * SCALING
    return weight


@triton.jit
def _order(number):
    """int32 in the order of float32 numbers, NaN above all."""
    bits = number.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(number == number, ordered, _NAN)


@triton.jit
def _number(ordered):
    """The number that `_order` has put there."""
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_chosen_groups(
    left,
    expert,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`left`, but the lowest for experts of groups that are not among the best; each group has SIZE experts."""
    group = expert // SIZE
    lowest = tl.full((BLOCK,), _LOWEST, tl.int32)
    ranks = lowest
    for index in tl.static_range(NUM_GROUPS):
        own = tl.where(group == index, left, lowest)
        best = tl.max(own)
        score = _number(tl.zeros_like(left) + best)
        if SUMS_TWO:
            first = tl.min(tl.where(own == best, expert, BLOCK))
            second = tl.max(tl.where(expert == first, lowest, own))
            score += _number(tl.zeros_like(left) + second)
        ranks = tl.where(group == index, _order(score), ranks)
    is_chosen = expert < 0
    for _index in tl.static_range(NUM_CHOSEN):
        first = tl.min(tl.where(ranks == tl.max(ranks), group, BLOCK))
        is_chosen = is_chosen | (group == first)
        ranks = tl.where(group == first, lowest, ranks)
    return tl.where(is_chosen, left, lowest)


_choose = Launcher(_choose_kernel, enable_fp_fusion=False)
