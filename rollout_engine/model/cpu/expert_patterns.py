"""Recognises routers and experts that compute what `experts` does, by trial like `modules.module_patterns`."""

import copy
import itertools
import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from rollout_engine.model.cpu.experts import Routing, RowInvariantExperts, RowInvariantRouter, swap_experts, swap_router
from rollout_engine.model.modules.module_patterns import SILU_CLASSES, agree, copy_with


def routing_of(child: nn.Module) -> Routing | None:
    """The `Routing` by which a router with one weight [E, H] chooses its `top_k` experts; None of others."""
    if not _has_parameters(child, {"weight": 2}) or list(child.children()) or isinstance(child, RowInvariantRouter):
        return None
    if not isinstance(getattr(child, "top_k", None), int):
        return None
    weight = _waves(6, 8, dtype=child.weight.dtype)
    trial = copy_with(child, _parameters={"weight": weight}, top_k=3, num_experts=6, hidden_dim=8)
    x = _waves(24, 8, dtype=weight.dtype) * 4
    for routing in itertools.starmap(Routing, itertools.product((True, False), repeat=2)):
        ours = copy.copy(trial)
        swap_router(ours, routing)
        if agree(trial, ours, x):
            return routing
    return None


def are_gated_experts(child: nn.Module) -> bool:
    """Whether `child` weights and adds down(silu(gate(x)) * up(x)) of the experts chosen for each token."""
    if not _has_parameters(child, {"gate_up_proj": 3, "down_proj": 3}) or isinstance(child, RowInvariantExperts):
        return False
    children = dict(child.named_children())
    if children.keys() != {"act_fn"} or type(children["act_fn"]) not in SILU_CLASSES:
        return False
    dtype = child.down_proj.dtype
    small = {"gate_up_proj": _waves(4, 10, 8, dtype=dtype), "down_proj": _waves(4, 8, 5, dtype=dtype)}
    config = SimpleNamespace(_experts_implementation="eager")
    trial = copy_with(child, _parameters=small, num_experts=4, hidden_dim=8, intermediate_dim=5, config=config)
    ours = copy.copy(trial)
    swap_experts(ours)
    index = torch.arange(48).view(24, 2).mul(7).remainder(4)
    index[:, 1] = (index[:, 0] + 1 + index[:, 1] % 3) % 4
    return agree(trial, ours, _waves(24, 8, dtype=dtype), index, _waves(24, 2, dtype=dtype).abs())


def _has_parameters(child: nn.Module, dimensions: dict[str, int]) -> bool:
    return {name: p.dim() for name, p in child.named_parameters(recurse=False)} == dimensions


def _waves(*shape: int, dtype: torch.dtype) -> Tensor:
    """Fixed irregular numbers in (-0.5, 0.5); nothing is drawn from torch's generator."""
    return torch.arange(math.prod(shape)).view(shape).square().mul(0.37).sin().mul(0.5).to(dtype)
