"""Swap what a Hugging Face module computes with for row-invariant twins, in place, and name what could not be.

The engine and `rollout_engine.exact` on the trainer call the same function, so they round at the same places. SiLU and
the product that follows it run as one pass. Names in `state_dict` do not change.
"""

from torch import Tensor, nn

from rollout_engine.kernels.activation import gated_silu, silu
from rollout_engine.kernels.norm import rms_norm
from rollout_engine.model.experts import RowInvariantExperts, RowInvariantRouter, swap_experts, swap_router
from rollout_engine.model.formulas import SILU_CLASSES, are_gated_experts, is_gated_mlp, rms_norm_epsilon, routing_of
from rollout_engine.model.fusion import RowInvariantLinear, swap_linears


def make_row_invariant(module: nn.Module) -> None:
    """Replace every `nn.Linear`, SiLU, and the norms, gated MLPs and experts whose formula is ours, below `module`.

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


def unproven_parts(module: nn.Module) -> list[str]:
    """Names of what still may make a row depend on its batch, once `make_row_invariant` is done.

    Weights multiplied by something we did not replace (GPT-2's own linears, mixtures of another formula), and
    activations other than SiLU (`kernels.activation` says what is wrong with torch's).
    """
    found = []
    for path, child in module.named_modules():
        if type(child).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
            found.append(path)
        elif not isinstance(child, RowInvariantLinear | RowInvariantRouter | RowInvariantExperts | nn.Embedding):
            own = child.named_parameters(recurse=False)
            found += [f"{path}.{name}" for name, parameter in own if parameter.dim() > 1]
    return found


class RowInvariantSiLU(nn.Module):
    """`kernels.activation.silu` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return silu(input)


class RowInvariantMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of three linears."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


class RowInvariantRMSNorm(nn.Module):
    """`kernels.norm.rms_norm` as a module."""

    _epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self._epsilon)
