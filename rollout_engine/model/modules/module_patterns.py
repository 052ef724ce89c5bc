"""Recognises modules that compute a formula we have a kernel for, by trial instead of by name.

A module is run with known weights, so a norm that multiplies by (1 + weight), or rounds elsewhere, is not recognised.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from rollout_engine.kernels.activation import gated_silu, gelu_tanh
from rollout_engine.kernels.norm import gated_rms_norm, offset_rms_norm, rms_norm, single_rms_norm
from rollout_engine.model.packing.module_types import tensor_of

SILU_CLASSES = (nn.SiLU, SiLUActivation)
_EPSILON_NAMES = ("variance_epsilon", "eps")
LARGE = 1e3
"""Times an input of a trial: shows limits to which activations are clamped."""


def children_of_one_dtype(module: nn.Module) -> Iterator[nn.Module]:
    """Every module below `module` but those with parameters in another dtype than its first parameter.

    Such a part, which a checkpoint keeps in float32, converts its input and output as it likes, and the patterns below
    try a module in the dtype of its own weights only.
    """
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    for child in list(module.modules()):
        if all(p.dtype == dtype or not p.is_floating_point() for p in child.parameters(recurse=False)):
            yield child


class MLPNames(NamedTuple):
    """Names of the parts of down(silu(gate(x)) * up(x))."""

    gate_up: tuple[str, ...]
    """Those whose outputs, side by side, are gate and up."""
    down: str
    activation: str | None = None
    """The module of SiLU; None: the forward calls a function."""

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of all linears."""
        return *self.gate_up, self.down

    def activate(self, linears: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        """silu(gate(x)) * up(x) by these linears."""
        gate, up = torch.cat([linears[name](x) for name in self.gate_up], -1).chunk(2, dim=-1)
        return gated_silu(gate, up)


LLAMA_MLP = MLPNames(("gate_proj", "up_proj"), "down_proj", "act_fn")
MLP_NAMES = (LLAMA_MLP, MLPNames(("w1", "w3"), "w2"), MLPNames(("input_linear",), "output_linear", "activation"))
"""Names in modelling files of transformers: of Llama, LFM2 and Granite 4."""


def is_gated_mlp(child: nn.Module) -> bool:
    """Whether `child` computes down(silu(gate(x)) * up(x)) with linears of Llama's names, tried with small ones."""
    return gated_mlp_names(child) == LLAMA_MLP


def gated_mlp_names(child: nn.Module) -> MLPNames | None:
    """The linears by which `child` computes down(silu(gate(x)) * up(x)), tried with small ones; None of others."""
    children = dict(child.named_children())
    names = next((each for each in MLP_NAMES if children.keys() == {*each.linears, each.activation} - {None}), None)
    if names is None or any(type(children[name]) is not nn.Linear for name in names.linears):
        return None
    activations = {name: part for name, part in children.items() if name == names.activation}
    if any(type(part) not in SILU_CLASSES for part in activations.values()):
        return None
    if [*child.parameters(recurse=False), *child.buffers(recurse=False)]:
        return None
    small = {name: _small_linear(8, 32 // len(names.gate_up)) for name in names.gate_up}
    small[names.down] = _small_linear(16, 8)
    trial = copy_with(child, _modules=small | activations)
    x = torch.linspace(-4, 4, 24).view(3, 8)

    def compute(x: Tensor) -> Tensor:
        out: Tensor = small[names.down](names.activate(small, x))
        return out

    return names if agree(trial, compute, x) and agree(trial, compute, x * LARGE) else None


def is_squared_relu_mlp(child: nn.Module) -> bool:
    """Whether `child` computes down(max(up(x), 0)^2), tried with small linears."""
    children = dict(child.named_children())
    linears = [children.get(name) for name in ("up_proj", "down_proj")]
    own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
    if own or children.keys() != {"up_proj", "down_proj", "act_fn"} or not _are_linears(linears):
        return False
    small = {"up_proj": _small_linear(8, 16), "down_proj": _small_linear(16, 8)}
    trial = copy_with(child, _modules=small | {"act_fn": children["act_fn"]})
    x = torch.linspace(-4, 4, 24).view(3, 8)

    def compute(x: Tensor) -> Tensor:
        out: Tensor = small["down_proj"](small["up_proj"](x).relu().square())
        return out

    return agree(trial, compute, x) and agree(trial, compute, x * LARGE)


def is_squared_relu(child: object) -> bool:
    """Whether a module computes max(x, 0)^2 of each element."""
    x = torch.linspace(-6, 6, 301)
    return isinstance(child, nn.Module) and agree(child, lambda x: x.relu().square(), x)


def _are_linears(children: Sequence[nn.Module | None]) -> bool:
    return all(isinstance(child, nn.Linear) for child in children)


def rms_norm_epsilon(child: nn.Module) -> float | None:
    """The epsilon of a module that computes `kernels.norm.rms_norm`, tried with another weight; None of others."""
    return _epsilon_of(child, rms_norm)


def offset_norm_epsilon(child: nn.Module) -> float | None:
    """The epsilon of a module that computes `kernels.norm.offset_rms_norm`, found in the same way."""
    return _epsilon_of(child, offset_rms_norm)


def single_norm_epsilon(child: nn.Module) -> float | None:
    """The epsilon of a module that computes `kernels.norm.single_rms_norm`, found in the same way."""
    return _epsilon_of(child, single_rms_norm)


def gated_norm_options(child: nn.Module) -> dict[str, Any] | None:
    """Arguments of `kernels.norm.gated_rms_norm` behind the weight, for a module that computes it; None of others.

    It is tried with another weight, and with inputs and gates of the weight's dtype and of float32.
    """
    prepared = _with_known_weight(child)
    if prepared is None:
        return None
    trial, weight, epsilon = prepared
    x = torch.linspace(-4, 5, 6 * len(weight)).view(2, 3, -1) * torch.tensor([[1.0], [1e-1], [1e-3]])
    gate = 3 * torch.linspace(-2, 3, x.numel()).sin().view(x.shape)
    dtypes = {weight.dtype, torch.float32}
    given = [(x.to(of_x), gate.to(of_gate)) for of_x in dtypes for of_gate in dtypes]
    group_size = getattr(child, "group_size", len(weight))
    for gate_first, activation, rounds_norm in itertools.product((False, True), ("silu", "sigmoid"), (True, False)):
        how: dict[str, Any] = {"group_size": group_size, "gate_first": gate_first, "activation": activation}
        how["rounds_norm"] = rounds_norm
        ours: Callable[..., Tensor] = partial(gated_rms_norm, weight=weight, epsilon=epsilon, **how)
        if all(agree(trial, ours, *inputs) for inputs in given):
            return {"epsilon": epsilon} | how
    return None


def _epsilon_of(child: nn.Module, norm: Callable[[Tensor, Tensor, float], Tensor]) -> float | None:
    prepared = _with_known_weight(child)
    if prepared is None:
        return None
    trial, weight, epsilon = prepared
    rows = torch.linspace(-4, 5, 3 * len(weight)).view(3, -1) * torch.tensor([[1.0], [1e-2], [1e-4]])
    return epsilon if agree(trial, lambda x: norm(x, weight, epsilon), rows.to(weight.dtype)) else None


def _with_known_weight(child: nn.Module) -> tuple[nn.Module, Tensor, float] | None:
    """A copy of a norm with another weight, this weight [D], and the norm's epsilon; None if it is no norm."""
    epsilon = next((getattr(child, name) for name in _EPSILON_NAMES if hasattr(child, name)), None)
    if not isinstance(epsilon, float) or [name for name, _ in child.named_parameters()] != ["weight"]:
        return None
    like = tensor_of(child)
    weight = torch.linspace(-1.5, 2.5, like.numel(), dtype=like.dtype)
    if weight.shape != like.shape or [*child.children(), *child.buffers()]:
        return None
    trial = copy_with(child, _parameters=child._parameters | {"weight": nn.Parameter(weight, requires_grad=False)})
    return trial, weight, epsilon


def is_gelu_tanh(child: nn.Module) -> bool:
    """Whether `child` is an activation that computes `kernels.activation.gelu_tanh`, rounding once."""
    if type(child).__module__ not in ("transformers.activations", "torch.nn.modules.activation"):
        return False
    x = torch.linspace(-6, 6, 301)
    # Far below zero the usual form loses digits, so rounding is compared above it only.
    return agree(child, gelu_tanh, x) and agree(child, gelu_tanh, x[x > -1].bfloat16())


def _small_linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear with fixed weights; nothing is drawn from torch's generator."""
    result: nn.Linear = nn.utils.skip_init(nn.Linear, in_features, out_features)
    for parameter in result.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape).sin())
    return result


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Names of functions and attributes in the code of the forward of a module's class."""
    forward: Any = inspect.unwrap(type(module).forward)
    return frozenset(getattr(getattr(forward, "__code__", None), "co_names", ()))


def copy_with(module: nn.Module, **attributes: object) -> nn.Module:
    """A shallow copy of `module` with some attributes replaced."""
    trial = copy.copy(module)
    vars(trial).update(attributes)
    return trial


@torch.no_grad()
def agree(module: nn.Module, ours: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether `module` takes these inputs and agrees with `ours`: almost equal, and mostly equal when rounded."""
    if len(inspect.signature(module.forward).parameters) != len(inputs):
        return False
    try:
        theirs, mine = _as_tuple(module.forward(*inputs)), _as_tuple(ours(*inputs))  # without the module's hooks
    except Exception:  # foreign modules may fail in any way: then they are not recognised
        return False
    return len(theirs) == len(mine) and all(map(same, theirs, mine))


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(theirs: Tensor, mine: Tensor) -> bool:
    """Whether tensors of one dtype are equal up to round-off, and mostly equal when rounded.

    Sums that nearly cancel keep the round-off of the largest number of their row, in an order that the CPU chooses.
    """
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        return False
    if not theirs.is_floating_point():
        return torch.equal(theirs, mine)
    one, two, relative = theirs.float(), mine.float(), 4 * torch.finfo(theirs.dtype).eps
    finite = torch.where(one.isfinite(), one.abs(), 0.0)
    near = (one - two).abs() <= relative * finite.amax(-1, keepdim=True)
    close = bool((near | torch.isclose(one, two, rtol=relative, atol=1e-6)).all())
    return close and (theirs.dtype == torch.float32 or bool((theirs == mine).float().mean() > 0.95))
