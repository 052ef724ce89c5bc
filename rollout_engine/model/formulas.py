"""Which foreign modules compute a formula that we have a kernel for. Found by trial, not by name.

A class is tried as it is, under weights of ours: a norm that multiplies by (1 + weight), or rounds elsewhere, is seen.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from rollout_engine.kernels.activation import gated_silu
from rollout_engine.kernels.gelu import gelu_tanh
from rollout_engine.kernels.norm import rms_norm
from rollout_engine.model.experts import Routing, RowInvariantExperts, RowInvariantRouter, swap_experts, swap_router

SILU_CLASSES = (nn.SiLU, SiLUActivation)
_EPSILON_NAMES = ("variance_epsilon", "eps")


def is_gated_mlp(child: nn.Module) -> bool:
    """Whether `child` is an MLP whose class computes down(silu(gate(x)) * up(x)): tried on small linears."""
    children = dict(child.named_children())
    shapes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
    if children.keys() != {*shapes, "act_fn"} or type(children["act_fn"]) not in SILU_CLASSES:
        return False
    if list(child.parameters(recurse=False)) or any(type(children[name]) is not nn.Linear for name in shapes):
        return False
    small = {name: _small_linear(*shape) for name, shape in shapes.items()}
    trial = _with(child, _modules=small | {"act_fn": children["act_fn"]})
    x = torch.linspace(-4, 4, 24).view(3, 8)
    return _agree(trial, lambda x: small["down_proj"](gated_silu(small["gate_proj"](x), small["up_proj"](x))), x)


def rms_norm_epsilon(child: nn.Module) -> float | None:
    """Epsilon of a norm that computes what `kernels.norm.rms_norm` does, tried under another weight; None of others."""
    epsilon = next((getattr(child, name) for name in _EPSILON_NAMES if hasattr(child, name)), None)
    if not isinstance(epsilon, float) or [name for name, _ in child.named_parameters()] != ["weight"]:
        return None
    weight = torch.linspace(-1.5, 2.5, child.weight.numel(), dtype=child.weight.dtype)
    if weight.shape != child.weight.shape or list(child.children()):
        return None
    trial = _with(child, _parameters=child._parameters | {"weight": nn.Parameter(weight, requires_grad=False)})
    rows = torch.linspace(-4, 5, 3 * len(weight)).view(3, -1) * torch.tensor([[1.0], [1e-2], [1e-4]])
    return epsilon if _agree(trial, lambda x: rms_norm(x, weight, epsilon), rows.to(weight.dtype)) else None


def is_gelu_tanh(child: nn.Module) -> bool:
    """Whether `child` is an activation that computes `kernels.gelu.gelu_tanh`, rounding once."""
    if type(child).__module__ not in ("transformers.activations", "torch.nn.modules.activation"):
        return False
    x = torch.linspace(-6, 6, 301)
    # Far below zero the usual form loses digits, so only above it is rounding comparable.
    return _agree(child, gelu_tanh, x) and _agree(child, gelu_tanh, x[x > -1].bfloat16())


def routing_of(child: nn.Module) -> Routing | None:
    """How a router with one weight [E, H] chooses its `top_k` experts, if it is one of the ways of `Routing`."""
    if not _has_parameters(child, {"weight": 2}) or list(child.children()) or isinstance(child, RowInvariantRouter):
        return None
    if not isinstance(getattr(child, "top_k", None), int):
        return None
    weight = _waves(6, 8, dtype=child.weight.dtype)
    trial = _with(child, _parameters={"weight": weight}, top_k=3, num_experts=6, hidden_dim=8)
    x = _waves(24, 8, dtype=weight.dtype) * 4
    for routing in itertools.starmap(Routing, itertools.product((True, False), repeat=2)):
        ours = copy.copy(trial)
        swap_router(ours, routing)
        if _agree(trial, ours, x):
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
    trial = _with(child, _parameters=small, num_experts=4, hidden_dim=8, intermediate_dim=5, config=config)
    ours = copy.copy(trial)
    swap_experts(ours)
    index = torch.arange(48).view(24, 2).mul(7).remainder(4)
    index[:, 1] = (index[:, 0] + 1 + index[:, 1] % 3) % 4
    return _agree(trial, ours, _waves(24, 8, dtype=dtype), index, _waves(24, 2, dtype=dtype).abs())


def _has_parameters(child: nn.Module, dimensions: dict[str, int]) -> bool:
    return {name: p.dim() for name, p in child.named_parameters(recurse=False)} == dimensions


def _waves(*shape: int, dtype: torch.dtype) -> Tensor:
    """Fixed numbers in (-0.5, 0.5) without a pattern; draws nothing from torch's generator."""
    return torch.arange(math.prod(shape)).view(shape).square().mul(0.37).sin().mul(0.5).to(dtype)


def _small_linear(in_features: int, out_features: int) -> nn.Linear:
    """Fixed weights; draws nothing from torch's generator."""
    result = nn.utils.skip_init(nn.Linear, in_features, out_features)
    for parameter in result.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape).sin())
    return result


def _with(module: nn.Module, **attributes: object) -> nn.Module:
    """A shallow copy of `module` with some attributes replaced."""
    trial = copy.copy(module)
    vars(trial).update(attributes)
    return trial


@torch.no_grad()
def _agree(module: nn.Module, ours: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether `module` takes these inputs and gives what `ours` does: all but equal, and mostly equal when rounded."""
    if len(inspect.signature(module.forward).parameters) != len(inputs):
        return False
    try:
        theirs, mine = _as_tuple(module.forward(*inputs)), _as_tuple(ours(*inputs))  # without the module's hooks
    except Exception:  # a foreign forward may dislike a trial in any way: then it is not ours
        return False
    return len(theirs) == len(mine) and all(map(_same, theirs, mine))


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _same(theirs: Tensor, mine: Tensor) -> bool:
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        return False
    if not theirs.is_floating_point():
        return torch.equal(theirs, mine)
    close = torch.allclose(theirs.float(), mine.float(), rtol=4 * torch.finfo(theirs.dtype).eps, atol=1e-6)
    return close and (theirs.dtype == torch.float32 or bool((theirs == mine).float().mean() > 0.95))
