"""Recognises routers, experts and mixtures that compute the same as `experts`, by trial like `module_patterns`."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout_engine.model.modules.experts import Routing, mixed
from rollout_engine.model.modules.module_patterns import LARGE, SILU_CLASSES, agree, copy_with
from rollout_engine.model.packing.module_types import tensor_of

_NUM_EXPERTS, _TOP_K, _HIDDEN, _INTERMEDIATE = 6, 3, 8, 5
EXPERT_MATRICES = {"gate_up_proj": 3, "down_proj": 3}
EXPERT_BIASES = {"gate_up_proj_bias": 2, "down_proj_bias": 2}
"""Parameters of experts, and how many dimensions they have."""
_NO_HOOKS: dict[str, Any] = {"_forward_pre_hooks": {}, "_forward_hooks": {}}
"""Hooks of trial copies: replays and ranks hook modules, which is not part of their formulas."""


def routing_of(child: nn.Module) -> Routing | None:
    """The `Routing` by which a router with one weight [E, H] chooses its `top_k` experts; None of others."""
    if not _has_parameters(child, {"weight": 2}) or list(child.children()):
        return None
    if not isinstance(getattr(child, "top_k", None), int):
        return None
    trial, x = _small_router(child), _waves(24, _HIDDEN, dtype=tensor_of(child).dtype) * 4
    weight = tensor_of(trial)

    def choose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, weight)
        return logits, *routing.select(logits, _TOP_K)

    for routing in itertools.starmap(Routing, itertools.product((True, False), repeat=2)):
        if agree(trial, choose, x):
            return routing
    return None


Gate = Callable[[nn.Module, Tensor], Tensor]
"""A method of a module of experts: the output of the first product [n, 2I] -> the input of the second [n, I]."""


class ExpertForm(NamedTuple):
    """The way a module of experts computes with its matrices, `gate_up_proj` and `down_proj`."""

    is_transposed: bool
    """Whether these are [E, in, out]; else [E, out, in]."""
    has_bias: bool
    """Whether `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, H] are added to the products."""
    gate: Gate | None
    """The module's own method between the two products; None: silu(gate) * up, first the columns of gate."""


_GATED = ExpertForm(is_transposed=False, has_bias=False, gate=None)


def are_gated_experts(child: nn.Module) -> bool:
    """Whether `child` weights and adds down(silu(gate(x)) * up(x)) of the experts chosen for each token."""
    return expert_form(child) == _GATED


def expert_form(child: nn.Module) -> ExpertForm | None:
    """The form of a module that weights and adds the outputs of the experts chosen for each token; None of others."""
    has_bias = _has_parameters(child, EXPERT_MATRICES | EXPERT_BIASES)
    if not has_bias and not _has_parameters(child, EXPERT_MATRICES):
        return None
    activations = list(child.children())
    is_silu = len(activations) == 1 and type(activations[0]) in SILU_CLASSES
    gates = [None] * is_silu + [gate for gate in [getattr(type(child), "_apply_gate", None)] if gate is not None]
    return next(
        (
            form
            for is_transposed, gate in itertools.product((False, True), gates)
            if _computes(child, form := ExpertForm(is_transposed, has_bias, gate))
        ),
        None,
    )


def _computes(child: nn.Module, form: ExpertForm) -> bool:
    """Whether a small copy of `child` computes as its form says."""
    trial, dtype = _small_experts(child, form), tensor_of(child, "down_proj").dtype
    gate_up, down = (
        tensor_of(trial, name).mT if form.is_transposed else tensor_of(trial, name) for name in EXPERT_MATRICES
    )
    biases = [tensor_of(trial, name) for name in EXPERT_BIASES] if form.has_bias else []
    gate = None if form.gate is None else partial(form.gate, trial)
    index = torch.arange(48).view(24, 2).mul(7).remainder(_NUM_EXPERTS)
    index[:, 1] = (index[:, 0] + 1 + index[:, 1] % 3) % _NUM_EXPERTS
    x, weights = _waves(24, _HIDDEN, dtype=dtype), _waves(24, 2, dtype=dtype).abs()

    def compute(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return mixed(x, index, weights, gate_up, down, biases, gate)

    return agree(trial, compute, x, index, weights) and agree(trial, compute, x * LARGE, index, weights)


def mixture_of(child: nn.Module) -> Routing | None:
    """The `Routing` of a block that sends x [B, T, H] through its router `gate`, then its `experts`; None of others."""
    children = dict(child.named_children())
    if children.keys() != {"gate", "experts"} or list(child.parameters(recurse=False)):
        return None
    gate, experts = children["gate"], children["experts"]
    routing = routing_of(gate)
    if routing is None or not are_gated_experts(experts):
        return None
    gate, experts = _small_router(gate), _small_experts(experts, _GATED)
    trial = copy_with(child, _modules={"gate": gate, "experts": experts}, hidden_dim=_HIDDEN)
    weight = tensor_of(gate)
    gate_up, down = tensor_of(experts, "gate_up_proj"), tensor_of(experts, "down_proj")
    x = _waves(2, 12, _HIDDEN, dtype=weight.dtype) * 4

    def mix(x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = routing.select(F.linear(rows, weight), _TOP_K)
        return mixed(rows, chosen, weights, gate_up, down).view(x.shape)

    return routing if agree(trial, mix, x) else None


def _small_router(child: nn.Module) -> nn.Module:
    sizes = {"top_k": _TOP_K, "num_experts": _NUM_EXPERTS, "hidden_dim": _HIDDEN}
    small = {"weight": _waves(_NUM_EXPERTS, _HIDDEN, dtype=tensor_of(child).dtype)}
    return copy_with(child, _parameters=small, **_NO_HOOKS, **sizes)


def _small_experts(child: nn.Module, form: ExpertForm) -> nn.Module:
    gate_up, down = (_NUM_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN), (_NUM_EXPERTS, _HIDDEN, _INTERMEDIATE)
    dtype = tensor_of(child, "down_proj").dtype
    small = {name: _waves(*shape, dtype=dtype) for name, shape in zip(EXPERT_MATRICES, (gate_up, down), strict=True)}
    if form.has_bias:
        small |= {
            name: _waves(*shape[:2], dtype=dtype) for name, shape in zip(EXPERT_BIASES, (gate_up, down), strict=True)
        }
    if form.is_transposed:
        small |= {name: small[name].mT.contiguous() for name in EXPERT_MATRICES}
    sizes = {"num_experts": _NUM_EXPERTS, "hidden_dim": _HIDDEN, "intermediate_dim": _INTERMEDIATE}
    config = SimpleNamespace(_experts_implementation="eager")
    return copy_with(child, _parameters=small, config=config, **_NO_HOOKS, **sizes)


def _has_parameters(child: nn.Module, dimensions: dict[str, int]) -> bool:
    """Whether these are its own parameters, and it has no buffers."""
    own = {name: p.dim() for name, p in child.named_parameters(recurse=False)}
    return own == dimensions and not list(child.buffers(recurse=False))


def _waves(*shape: int, dtype: torch.dtype) -> Tensor:
    """Fixed irregular numbers in (-0.5, 0.5); nothing is drawn from torch's generator."""
    return torch.arange(math.prod(shape)).view(shape).square().mul(0.37).sin().mul(0.5).to(dtype)
