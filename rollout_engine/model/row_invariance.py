"""Swap what a Hugging Face module computes with for row-invariant twins, in place, and name what could not be.

The engine and `rollout_engine.exact` on the trainer call the same function, so they round at the same places. SiLU and
the product that follows it run as one pass. Names in `state_dict` do not change.
"""

from torch import Tensor, nn

from rollout_engine.kernels.activation import gated_silu, silu
from rollout_engine.kernels.gelu import gelu_tanh
from rollout_engine.kernels.norm import rms_norm
from rollout_engine.model.experts import RowInvariantExperts, RowInvariantRouter, swap_experts, swap_router
from rollout_engine.model.formulas import (
    SILU_CLASSES,
    are_gated_experts,
    is_gated_mlp,
    is_gelu_tanh,
    rms_norm_epsilon,
    routing_of,
)
from rollout_engine.model.fusion import RowInvariantLinear, swap_linears
from rollout_engine.model.row_trial import unproven_operations


def make_row_invariant(module: nn.Module) -> None:
    """Replace every `nn.Linear`, and the activations, norms, MLPs and experts whose formula is ours, below `module`.

    Parameters, their names and their tying stay as they are.
    """
    for child in list(module.modules()):
        if is_gated_mlp(child):
            child.__class__ = RowInvariantMLP
        elif (epsilon := rms_norm_epsilon(child)) is not None:
            child.__class__, child._epsilon = RowInvariantRMSNorm, epsilon
        elif (routing := routing_of(child)) is not None:
            swap_router(child, routing)
        elif are_gated_experts(child):
            swap_experts(child)
    swap_linears(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in SILU_CLASSES:
                setattr(parent, name, RowInvariantSiLU())
            elif is_gelu_tanh(child):
                setattr(parent, name, RowInvariantGELU())


def unproven_parts(module: nn.Module) -> list[str]:
    """What still may make a row depend on its batch once `make_row_invariant` is done: weights, then operations.

    Weights are those multiplied by something we did not replace (GPT-2's own linears, mixtures of another formula);
    operations are those that one forward of `module`, a causal LM, showed (`row_trial`).
    """
    found = []
    for path, child in module.named_modules():
        if not isinstance(child, RowInvariantLinear | RowInvariantRouter | RowInvariantExperts | nn.Embedding):
            own = child.named_parameters(recurse=False)
            found += [f"{path}.{name}" for name, parameter in own if parameter.dim() > 1]
    return found or unproven_operations(module)


class RowInvariantSiLU(nn.Module):
    """`kernels.activation.silu` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return silu(input)


class RowInvariantGELU(nn.Module):
    """`kernels.gelu.gelu_tanh` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu_tanh(input)


class RowInvariantMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of three linears."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


class RowInvariantRMSNorm(nn.Module):
    """`kernels.norm.rms_norm` as a module."""

    _epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self._epsilon)
