"""Formulas of mixtures of experts, as Hugging Face's modules compute them eagerly.

router    scores = softmax(W x) or sigmoid(W x); those of the k largest, or of the k with the largest sums of score and
          bias, perhaps of some groups of experts alone; normalised or not, times a number
experts   down(silu(gate(x)) * up(x)) of each expert that was chosen, weighted; a token's k outputs are added in the
          order of their experts' numbers. Products may have biases, and a module a gate of its own between them; the
          last experts of some mixtures return x itself

Kernels round at the same places.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.kernels.activation import gated_silu
from rollout_engine.kernels.routing_rule import RoutingRule

ScoresKernel = Callable[..., Tensor]
"""(logits [T, E], is_sigmoid=) -> scores, float32: their sigmoids, or the softmax of each row."""
_LOWEST = torch.iinfo(torch.int64).min


class Routing(RoutingRule):
    """The way a router turns its scores into weights of experts."""

    __slots__ = ()

    def select(
        self,
        logits: Tensor,
        k: int,
        kernel: ScoresKernel | None = None,
        *,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> (weights [T, k], the most wanted first, their experts int64 [T, k]); of equal the first.

        `kernel` replaces torch's scores; it need not support gradients. `bias` [E] is added to scores for the choice
        alone. `dtype`: that of the router's weight; None: that of the logits.
        """
        found = self._step(scores(logits, kernel or _scores, is_sigmoid=self.sigmoid), dtype or logits.dtype)
        wanted = found.detach() if bias is None else (found + bias).detach()
        experts = torch.topk(self._ranking(wanted), k, dim=-1).indices
        weights = found.gather(-1, experts)
        if self.normalised:
            total = self._step(sum_in_order(weights)[:, None], dtype or logits.dtype)
            total = self._step(total + self.added, dtype or logits.dtype) if self.added else total
            weights = weights / (total.clamp(min=self.least) if self.least else total)
            weights = self._step(weights, dtype or logits.dtype)
        if self.scaling != 1.0:
            weights = weights * self.scaling
        return weights.to(dtype or logits.dtype) if self.rounded else weights, experts

    def _step(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 numbers, rounded to `dtype` if this rule rounds after each step."""
        return x.to(dtype).float() if self.stepwise else x

    def _ranking(self, wanted: Tensor) -> Tensor:
        """Integers [T, E] in the order of `wanted` float32 [T, E], with all experts of other groups behind."""
        ranking = _ranking(wanted)
        if self.groups is None:
            return ranking
        grouped = wanted.unflatten(-1, (self.groups.num, -1))
        best = grouped.topk(2 if self.groups.sums_two else 1, dim=-1).values
        group_scores = best[..., 0] + best[..., 1] if self.groups.sums_two else best[..., 0]
        chosen = torch.topk(_ranking(group_scores), self.groups.num_chosen, dim=-1).indices
        is_chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, value=True)
        return ranking.masked_fill(~is_chosen.repeat_interleave(grouped.shape[-1], -1), _LOWEST)


def scores(logits: Tensor, kernel: ScoresKernel, *, is_sigmoid: bool) -> Tensor:
    """Scores float32 [T, E] of logits [T, E] by a kernel, with gradients."""
    with_gradients = torch.is_grad_enabled() and logits.requires_grad
    found: Tensor
    found = _Scores.apply(logits, kernel, is_sigmoid) if with_gradients else kernel(logits, is_sigmoid=is_sigmoid)
    return found


class _Scores(torch.autograd.Function):
    """Scores by a kernel, with gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kernel: ScoresKernel, is_sigmoid: bool) -> Tensor:
        found = kernel(logits, is_sigmoid=is_sigmoid)
        ctx.dtype, ctx.is_sigmoid = logits.dtype, is_sigmoid
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (found,) = ctx.saved_tensors
        if ctx.is_sigmoid:
            grad_logits = grad * found * (1.0 - found)
        else:
            grad_logits = torch.ops.aten._softmax_backward_data(grad, found, -1, torch.float32)
        return grad_logits.to(ctx.dtype), None, None


def _scores(logits: Tensor, *, is_sigmoid: bool) -> Tensor:
    return logits.float().sigmoid() if is_sigmoid else torch.softmax(logits.float(), dim=-1)


def _ranking(numbers: Tensor) -> Tensor:
    """Integers [T, E] in the order of float32 numbers, NaN above all, then of the lower places; none are equal.

    Of equal numbers `torch.topk` would choose any. It has to be called: a replay gives experts there (`routers`).
    """
    bits = numbers.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(numbers.isnan(), 0x7FFFFFFF).long()
    count = numbers.shape[-1]
    return ordered * count - torch.arange(count, device=bits.device)


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

    Experts for which `down` has no matrix return their input, whatever `gate_up` has for them.

    `biases`: those of the two products, [E, 2I] and [E, H], added to results that are rounded. `gate`: [n, 2I] ->
    [n, I], in place of silu(gate) * up.
    """
    index, slots = experts.sort(dim=-1)
    outputs = x.new_empty(*index.shape, x.shape[1])
    for expert in index.unique().tolist():
        chosen = index == expert
        if expert >= len(down):
            outputs[chosen] = x[chosen.any(-1)]
            continue
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
