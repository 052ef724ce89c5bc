"""Replaces parts of a trainer's module by the kernels of deterministic steps, in place, with gradients.

Residual sums, rotations and look-ups stay Hugging Face's own: the kernels round at the same points. Names in
`state_dict` do not change.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels import activation, norm
from rollout_engine.kernels.latent import LatentKernels
from rollout_engine.kernels.triton import latent as triton_latent
from rollout_engine.kernels.triton.adapters import added
from rollout_engine.kernels.triton.dense import attend_dense
from rollout_engine.kernels.triton.entropy import row_figures
from rollout_engine.kernels.triton.matmul import tile_for
from rollout_engine.kernels.triton.sampling import score
from rollout_engine.model.backend import Arithmetic
from rollout_engine.model.cuda.experts import TrainedExperts, TrainedRouter, swap_experts, swap_router
from rollout_engine.model.cuda.gradients import (
    OwnRouterProduct,
    Product,
    gated_rows,
    norm_rows,
    scores,
    takes_scores,
)
from rollout_engine.model.cuda.state_layers import REPLACED, OffsetNorm, make_mixers_exact
from rollout_engine.model.modules.attention_interface import rollout_attention
from rollout_engine.model.modules.expert_patterns import expert_form, router_pattern
from rollout_engine.model.modules.indexed_attention import has_indexers
from rollout_engine.model.modules.latent_attention import LatentProjection, cache_latents, use_latent_kernels
from rollout_engine.model.modules.module_patterns import (
    children_of_one_dtype,
    is_gated_mlp,
    offset_norm_epsilon,
    rms_norm_epsilon,
)
from rollout_engine.model.modules.own_forwards import OwnForward, RowScores, names_a_gate, swap_calls, swap_own_router
from rollout_engine.model.modules.routers import routers_of
from rollout_engine.model.modules.row_trial import unproven_parts
from rollout_engine.model.packing.linear_groups import linears_by_input
from rollout_engine.model.packing.module_types import become
from rollout_engine.model.ranks.cut import outputs_of

_ATTENTION_NAME = "rollout_engine_on_device"
_SCORES = RowScores(scores, takes_scores)
LATENT_KERNELS = LatentKernels(triton_latent.absorb, triton_latent.expand)


def make_row_invariant(module: nn.Module) -> None:
    """Replace every `nn.Linear`, and the norms, MLPs, routers and experts that our kernels compute, below a causal LM.

    Other routers, modules with gates and mixers keep their forwards, with our functions in them. Experts of which some
    return their input keep torch's own. Attention that expands latents caches latents instead.
    """
    cache_latents(module)
    if has_indexers(module):
        raise ConfigError(
            f"{type(module).__name__} attends to positions chosen by an indexer, and is exact on a CPU only."
        )
    use_latent_kernels(module, LATENT_KERNELS)
    make_mixers_exact(module, _SCORES)
    for child in children_of_one_dtype(module):
        if hasattr(child, "inv_freq"):
            _compute_on_the_host(module, child)
            if _refuse_coarse_products not in child._forward_pre_hooks.values():
                child.register_forward_pre_hook(_refuse_coarse_products)
        if is_gated_mlp(child):
            child.__class__ = _MLP
        elif (epsilon := rms_norm_epsilon(child)) is not None:
            become(child, _RMSNorm)._epsilon = epsilon
        elif (epsilon := offset_norm_epsilon(child)) is not None:
            become(child, OffsetNorm)._epsilon = epsilon
        elif isinstance(child, TrainedRouter | TrainedExperts):
            continue
        elif (pattern := router_pattern(child)) is not None:
            swap_router(child, pattern)
        elif (form := expert_form(child)) is not None and not form.has_identities:
            swap_experts(child, form)
    for router in routers_of(module):
        if not isinstance(router, TrainedRouter | OwnForward):
            swap_own_router(router, _SCORES, lambda _: [OwnRouterProduct(float32_out=wide) for wide in (False, True)])
    for child in list(module.modules()):
        if names_a_gate(child) and not isinstance(child, OwnForward):
            swap_calls(child, _SCORES)
    for group in linears_by_input(module, (nn.Linear, _Linear)):
        for child in group:
            become(child, _Linear)._num_beside = sum(outputs_of(each).whole for each in group)


def _refuse_coarse_products(rotary: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise `ConfigError` if torch would round positions and frequencies before it multiplies them."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise ConfigError(
            f"float32 products are of precision '{precision}', which rounds rotary positions: engine and trainer could "
            "differ. Call torch.set_float32_matmul_precision('highest') in both."
        )


@torch.no_grad()
def _compute_on_the_host(module: Any, rotary: nn.Module) -> None:
    """Compute rotary frequencies on the CPU, as engines do: powers on a device differ in the last bit."""
    twin = copy.copy(rotary)
    twin._buffers = {name: b if b is None else torch.empty_like(b, device="cpu") for name, b in rotary._buffers.items()}
    module._init_weights(twin)
    for name, buffer in rotary.named_buffers(recurse=False):
        buffer.copy_(twin.get_buffer(name))


class _Linear(nn.Linear):
    """Uses the tile of the engine's product, which computes this linear and its siblings together."""

    _num_beside: int
    """Outputs of this linear and its siblings."""

    def forward(self, input: Tensor) -> Tensor:
        tile = tile_for(self._num_beside, self.in_features, self.weight.dtype)
        rows = input.reshape(-1, self.in_features)
        out: Tensor = Product.apply(rows, self.weight, self.bias, tile, False)
        return out.view(*input.shape[:-1], self.out_features)


class _MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of three linears."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(activation.gated_silu(self.gate_proj(x), self.up_proj(x), gated_rows))
        return out


class _RMSNorm(nn.Module):
    weight: Tensor
    _epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return norm.rms_norm(hidden_states, self.weight, self._epsilon, norm_rows)


AttentionInterface.register(_ATTENTION_NAME, partial(rollout_attention, dense=attend_dense))
_KNOWN = _Linear | TrainedRouter | TrainedExperts | OwnForward | LatentProjection | REPLACED
_unproven_parts = partial(unproven_parts, _KNOWN)
ARITHMETIC = Arithmetic(_ATTENTION_NAME, make_row_invariant, _unproven_parts, score, added, row_figures)
