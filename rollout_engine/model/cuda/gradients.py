"""Kernels of deterministic steps with gradients, as a trainer's modules call them; all other operations are torch's.

Forward they give the bits of steps. Backward they are ordinary products.
"""

from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.routing_rule import RoutingRule
from rollout_engine.kernels.triton import experts as grouped
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.experts import Groups
from rollout_engine.kernels.triton.matmul import Tile, matmul, tile_for
from rollout_engine.kernels.triton.norm import rms_norm
from rollout_engine.kernels.triton.routers import choose

_MOST_SCORES = 4096
"""Most logits of a row: one program holds them all."""


class Product(torch.autograd.Function):
    """Product of x [R, K] with a weight [N, K], plus a bias [N] if there is one -> [R, N].

    `float32_out`: sums are not rounded to the dtype of x; nor are gradients of x and the weight, until they are whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, float32_out: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(len(x), len(weight), dtype=torch.float32 if float32_out else x.dtype)
        return matmul(x, weight, bias, out, tile)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _, _ = ctx.needs_input_grad
        return (
            (grad @ weight.to(grad.dtype)).to(x.dtype) if for_x else None,
            (grad.t() @ x.to(grad.dtype)).to(weight.dtype) if for_weight else None,
            grad.sum(0).to(weight.dtype) if for_bias else None,
            None,
            None,
        )


class OwnRouterProduct:
    """Satisfies `modules.own_forwards.OwnProduct`."""

    def __init__(self, *, float32_out: bool) -> None:
        self.float32_out = float32_out

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tile = tile_for(len(weight), weight.shape[1], weight.dtype)
        out: Tensor = Product.apply(rows, weight, bias, tile, self.float32_out)
        return out


class ExpertProduct(torch.autograd.Function):
    """Product of each row of x [N, K], in the order of `groups`, with its expert's weight of [E, O, K] -> [N, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(x, weight)
        return grouped.multiply(x.contiguous(), weight, groups, x.new_empty(len(x), weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if for_x else None
        grad_weight = torch.zeros_like(weight) if for_weight else None
        starts = ctx.groups.starts.tolist()
        for expert, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            if start == end:
                continue
            if grad_x is not None:
                torch.mm(grad[start:end], weight[expert], out=grad_x[start:end])
            if grad_weight is not None:
                torch.mm(grad[start:end].t(), x[start:end], out=grad_weight[expert])
        return grad_x, grad_weight, None


def scores(logits: Tensor, *, is_sigmoid: bool) -> Tensor:
    """Sigmoids or softmax of logits [T, E], float32, without gradients, as `kernels.triton.routers` computes them."""
    logits = logits.contiguous()
    found = torch.empty_like(logits, dtype=torch.float32)
    weights, experts = logits.new_empty(len(logits), 1), logits.new_empty(len(logits), 1, dtype=torch.int32)
    rule = RoutingRule(normalised=False, rounded=False, sigmoid=is_sigmoid)
    choose(logits, weights, experts, rule, scores=found)
    return found


def takes_scores(logits: Tensor) -> bool:
    """Whether `scores` takes logits [..., E]."""
    return logits.is_floating_point() and 0 < logits.shape[-1] <= _MOST_SCORES


def gated_rows(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of equal shapes [..., D], without gradients: the forward of `kernels.activation.gated_silu`."""
    gate, up, out = gate.contiguous(), up.contiguous(), torch.empty_like(gate, memory_format=torch.contiguous_format)
    rows = [x.view(-1, x.shape[-1]) for x in (gate, up, out)]
    gated(rows[0], rows[1], rows[2])
    return out


def norm_rows(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x [..., D], without gradients: the forward of `kernels.norm.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    return rms_norm(rows, weight, epsilon, torch.empty_like(rows)).view(x.shape)


def offset_norm_rows(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x [..., D] by 1 + weight, without gradients: the forward of `kernels.norm.offset_rms_norm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rms_norm(rows, weight, epsilon, torch.empty_like(rows), has_offset=True).view(x.shape)
