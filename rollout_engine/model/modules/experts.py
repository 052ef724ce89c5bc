"""What mixtures of experts compute, as Hugging Face's modules do eagerly; kernels round at the same places.

router    probabilities = softmax(W x); the k largest, normalised or not
experts   down(silu(gate(x)) * up(x)) of each expert that was chosen, weighted; a token's k outputs are added in the
          order of their experts' numbers
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.kernels.activation import gated_silu


class Routing(NamedTuple):
    """The way a router turns its probabilities into weights of experts."""

    normalised: bool
    """Whether the k largest are divided by their sum."""
    rounded: bool
    """Whether they are rounded to the dtype of the logits; else they stay float32."""

    def select(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> (weights [T, k], largest first, their experts int64 [T, k])."""
        largest, experts = torch.topk(torch.softmax(logits.float(), dim=-1), k, dim=-1)
        return self.weights(largest, logits.dtype), experts

    def weights(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights [T, k] of the largest probabilities, float32, largest first; `dtype` is that of the logits."""
        weights = largest / sum_in_order(largest)[:, None] if self.normalised else largest
        return weights.to(dtype) if self.rounded else weights


def mixed(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, H], experts int64 [T, k], their weights [T, k], gate_up [E, 2I, H], down [E, H, I] -> [T, H]."""
    index, slots = experts.sort(dim=-1)
    outputs = x.new_empty(*index.shape, x.shape[1])
    for expert in index.unique().tolist():
        chosen = index == expert
        gate, up = F.linear(x[chosen.any(-1)], gate_up[expert]).chunk(2, dim=-1)
        outputs[chosen] = F.linear(gated_silu(gate, up), down[expert])
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
