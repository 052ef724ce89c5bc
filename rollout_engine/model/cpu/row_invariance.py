"""Replaces parts of a Hugging Face module by row-invariant ones, in place, and names the parts it cannot replace.

The engine and `rollout_engine.exact` on the trainer call the same function, so they round at the same places. SiLU and
the product that follows it run as one pass. Names in `state_dict` do not change.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollout_engine.kernels.activation import gated_silu, gelu_tanh, silu
from rollout_engine.kernels.adapters import added
from rollout_engine.kernels.entropy import row_figures
from rollout_engine.kernels.norm import gated_rms_norm, offset_rms_norm, rms_norm, single_rms_norm
from rollout_engine.kernels.token_logprobs import row_stats
from rollout_engine.model.backend import Arithmetic
from rollout_engine.model.cpu.experts import (
    RowInvariantExperts,
    RowInvariantRouter,
    has_product,
    swap_experts,
    swap_router,
)
from rollout_engine.model.cpu.own_forwards import SCORES, swap_router_calls
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.expert_patterns import expert_form, router_pattern
from rollout_engine.model.modules.indexed_attention import index_attention
from rollout_engine.model.modules.latent_attention import LatentProjection, cache_latents
from rollout_engine.model.modules.mixers import MixerConvolution, mixers_of, swap_mixers
from rollout_engine.model.modules.module_patterns import (
    SILU_CLASSES,
    MLPNames,
    children_of_one_dtype,
    gated_mlp_names,
    gated_norm_options,
    is_gelu_tanh,
    offset_norm_epsilon,
    rms_norm_epsilon,
    single_norm_epsilon,
)
from rollout_engine.model.modules.own_forwards import OwnForward, names_a_gate, names_an_activation, swap_calls
from rollout_engine.model.modules.routers import routers_of
from rollout_engine.model.modules.row_trial import unproven_parts as unproven_parts_but
from rollout_engine.model.packing.linear_groups import RowInvariantLinear, swap_linears
from rollout_engine.model.packing.module_types import become


def make_row_invariant(module: nn.Module) -> None:
    """Replace every `nn.Linear`, and the activations, norms, MLPs and experts that our kernels compute, below `module`.

    Other routers, modules with gates and mixers keep their forwards, with our functions in them.

    Attention that expands latents caches these instead. Parameters, their names and their tying stay as they are.
    """
    cache_latents(module)
    index_attention(module)
    swap_mixers(module)
    for mixer in mixers_of(module):
        for child in mixer.modules():
            if (options := gated_norm_options(child)) is not None:
                become(child, RowInvariantGatedNorm)._options = options
            elif names_an_activation(child) and not isinstance(child, OwnForward):
                swap_calls(child, SCORES)  # before a gated norm is taken for a norm
    for child in children_of_one_dtype(module):
        if isinstance(child, OwnForward):
            continue
        if (names := gated_mlp_names(child)) is not None:
            become(child, RowInvariantMLP)._names = names
        elif (epsilon := rms_norm_epsilon(child)) is not None:
            become(child, RowInvariantRMSNorm)._epsilon = epsilon
        elif (epsilon := offset_norm_epsilon(child)) is not None:
            become(child, RowInvariantOffsetNorm)._epsilon = epsilon
        elif (epsilon := single_norm_epsilon(child)) is not None:
            become(child, RowInvariantSingleNorm)._epsilon = epsilon
        elif isinstance(child, RowInvariantRouter | RowInvariantExperts):
            continue
        elif (pattern := router_pattern(child, takes_steps=True)) is not None and has_product(pattern, child):
            swap_router(child, pattern)
        elif (form := expert_form(child)) is not None:
            swap_experts(child, form)
    for router in routers_of(module):
        if not isinstance(router, RowInvariantRouter | OwnForward):
            swap_router_calls(router)
    for child in list(module.modules()):
        if names_a_gate(child) and not isinstance(child, OwnForward):
            swap_calls(child, SCORES)
    swap_linears(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in SILU_CLASSES:
                setattr(parent, name, RowInvariantActivation(silu))
            elif is_gelu_tanh(child):
                setattr(parent, name, RowInvariantActivation(gelu_tanh))


class RowInvariantActivation(nn.Module):
    """A function of each element as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input)


class RowInvariantMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of two or three linears."""

    _names: MLPNames

    def forward(self, x: Tensor) -> Tensor:
        gate_up = [getattr(self, name)(x) for name in self._names.gate_up]
        gate, up = gate_up if len(gate_up) == 2 else gate_up[0].chunk(2, dim=-1)
        out: Tensor = getattr(self, self._names.down)(gated_silu(gate, up))
        return out


class RowInvariantRMSNorm(nn.Module):
    """`kernels.norm.rms_norm` as a module."""

    weight: Tensor
    _epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self._epsilon)


class RowInvariantOffsetNorm(nn.Module):
    """`kernels.norm.offset_rms_norm` as a module."""

    weight: Tensor
    _epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return offset_rms_norm(x, self.weight, self._epsilon)


class RowInvariantSingleNorm(nn.Module):
    """`kernels.norm.single_rms_norm` as a module."""

    weight: Tensor
    _epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return single_rms_norm(hidden_states, self.weight, self._epsilon)


class RowInvariantGatedNorm(nn.Module):
    """`kernels.norm.gated_rms_norm` as a module."""

    weight: Tensor
    _options: dict[str, Any]

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return gated_rms_norm(hidden_states, gate, self.weight, **self._options)


_REPLACED = (
    RowInvariantLinear | RowInvariantRouter | RowInvariantExperts | OwnForward | LatentProjection | MixerConvolution
)
unproven_parts = partial(unproven_parts_but, _REPLACED)
ARITHMETIC = Arithmetic(ATTENTION_NAME, make_row_invariant, unproven_parts, row_stats, added, row_figures)
