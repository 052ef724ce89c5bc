"""Which foreign modules compute a formula that we have a kernel for. Found by trial, not by name.

A class is tried as it is, under weights of ours: a norm that multiplies by (1 + weight), or rounds elsewhere, is seen.
"""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from rollout_engine.kernels.activation import gated_silu
from rollout_engine.kernels.norm import rms_norm

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
def _agree(module: nn.Module, ours: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether `module` takes one argument and gives what `ours` does: all but equal, and mostly equal when rounded."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    try:
        theirs, mine = module.forward(x), ours(x)  # without the module's hooks
    except Exception:  # a foreign forward may dislike a trial in any way: then it is not ours
        return False
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        return False
    close = torch.allclose(theirs.float(), mine.float(), rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6)
    return close and (x.dtype == torch.float32 or bool((theirs == mine).float().mean() > 0.95))
