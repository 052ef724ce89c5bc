"""Formulas of mixtures of experts, as Hugging Face's modules compute them eagerly.

router    probabilities = softmax(W x); the k largest, normalised or not
experts   down(silu(gate(x)) * up(x)) of each expert that was chosen, weighted; a token's k outputs are added in the
          order of their experts' numbers. Products may have biases, and a module a gate of its own between them

Kernels round at the same places.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.kernels.activation import gated_silu

SoftmaxKernel = Callable[[Tensor], Tensor]
"""Logits [T, E] -> probabilities, float32."""


class Routing(NamedTuple):
    """The way a router turns its probabilities into weights of experts."""

    normalised: bool
    """Whether the k largest are divided by their sum."""
    rounded: bool
    """Whether they are rounded to the dtype of the logits; else they stay float32."""

    def select(self, logits: Tensor, k: int, softmax: SoftmaxKernel | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> (weights [T, k], largest first, their experts int64 [T, k]); of equal ones the first.

        `softmax` replaces torch's; it need not support gradients.
        """
        softmax = softmax or _softmax
        with_gradients = torch.is_grad_enabled() and logits.requires_grad
        probabilities = _Probabilities.apply(logits, softmax) if with_gradients else softmax(logits)
        experts = torch.topk(_ranking(probabilities), k, dim=-1).indices
        weights = probabilities.gather(-1, experts)
        if self.normalised:
            weights = weights / sum_in_order(weights)[:, None]
        return weights.to(logits.dtype) if self.rounded else weights, experts


class _Probabilities(torch.autograd.Function):
    """Softmax by a kernel, with gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, softmax: SoftmaxKernel) -> Tensor:
        probabilities = softmax(logits)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        grad_logits = torch.ops.aten._softmax_backward_data(grad, probabilities, -1, torch.float32)
        return grad_logits.to(ctx.dtype), None


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits.float(), dim=-1)


def _ranking(probabilities: Tensor) -> Tensor:
    """Integers [T, E] in the order of the probabilities, then of the lower numbers; none are equal.

    Of equal numbers `torch.topk` would choose any. It has to be called: a replay gives experts there (`routers`).
    """
    bits = probabilities.detach().view(torch.int32).long() & 0x7FFFFFFF  # in the order of numbers that are not negative
    num_experts = probabilities.shape[-1]
    return bits * num_experts - torch.arange(num_experts, device=bits.device)


def mixed(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: Sequence[Tensor] = (),
    gate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Outputs [T, H] of experts int64 [T, k] with weights [T, k] for x [T, H]; gate_up [E, 2I, H], down [E, H, I].

    `biases`: those of the two products, [E, 2I] and [E, H], added to results that are rounded. `gate`: [n, 2I] ->
    [n, I], in place of silu(gate) * up.
    """
    index, slots = experts.sort(dim=-1)
    outputs = x.new_empty(*index.shape, x.shape[1])
    for expert in index.unique().tolist():
        chosen = index == expert
        projected = F.linear(x[chosen.any(-1)], gate_up[expert])
        projected = projected + biases[0][expert] if biases else projected
        first, second = projected.chunk(2, dim=-1)
        activated = gated_silu(first, second) if gate is None else gate(projected)
        output = F.linear(activated, down[expert])
        outputs[chosen] = output + biases[1][expert] if biases else output
    return add_weighted(outputs, weights.gather(1, slots))


def add_weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Outputs [T, k, H] times their weights [T, k], added over k; rounded to the dtype of the outputs after each."""
    return sum_in_order((outputs * weights[..., None]).to(outputs.dtype))


def sum_in_order(parts: Tensor) -> Tensor:
    """Sum of parts [T, k, ...] over k, rounded after each, in the same order for every T."""
    total = parts[:, 0]
    for slot in range(1, parts.shape[1]):
        total = total + parts[:, slot]
    return total
