"""Recognises routers and experts that compute the same as `experts`, by trial like `module_patterns`."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout_engine.kernels.routing_rule import Groups
from rollout_engine.model.modules.experts import Routing, mixed
from rollout_engine.model.modules.module_patterns import LARGE, SILU_CLASSES, agree, copy_with, same
from rollout_engine.model.packing.module_types import tensor_of

_NUM_EXPERTS, _HIDDEN, _INTERMEDIATE = 6, 8, 5
EXPERT_MATRICES = {"gate_up_proj": 3, "down_proj": 3}
_PLAIN_MATRICES = {"up_proj": 3, "down_proj": 3}
EXPERT_BIASES = {"gate_up_proj_bias": 2, "down_proj_bias": 2}
"""Parameters of experts, and how many dimensions they have."""
_COLUMNS = 16
"""Inputs of routers in trials."""
_MOST_EXPERTS = 1024
"""Number of different logits of a trial that are exact in bfloat16."""
_ADDED = (1e-20, 1e-6)
"""Added to sums of weights by DeepSeek-V3's code and by its descendants, and by LFM2's."""
_NO_HOOKS: dict[str, Any] = {"_forward_pre_hooks": {}, "_forward_hooks": {}}
"""Hooks of trial copies: replays and ranks hook modules, which is not part of their formulas."""


class RouterPattern(NamedTuple):
    """A router with one weight [E, H] that computes a formula of `experts`."""

    routing: Routing
    has_bias: bool
    """Whether it adds a bias [E] to its scores to choose: its own, or one that its caller gives."""
    bias_name: str | None
    """The attribute that holds its own."""
    logits_dtype: torch.dtype
    """That of the logits that it returns."""


def router_pattern(child: nn.Module, *, takes_steps: bool = False) -> RouterPattern | None:
    """The formula by which a router chooses its `top_k` experts; None of other modules.

    It is tried with its own numbers of experts and groups, over a few columns with known values. `takes_steps`: the
    rule may round each step to the dtype of the weight.
    """
    trial = _RouterTrial.of(child)
    if trial is None:
        return None
    found = trial.run(*trial.distinct())
    precise = trial.is_precise()
    if found is None or precise is None:
        return None
    rounds = takes_steps and trial.dtype != torch.float32 and not precise
    plain = list(trial.choices(precise))
    for routing in plain + [each._replace(stepwise=True) for each in plain if rounds]:
        if trial.chooses(routing, found) and (whole := trial.find_weighting(routing, found)) is not None:
            pattern = RouterPattern(whole, trial.has_bias, trial.bias_name, found.logits.dtype)
            return pattern if trial.agrees(whole) else None
    return None


Gate = Callable[[nn.Module, Tensor], Tensor]
"""A method of a module of experts: the output of the first product [n, 2I] -> the input of the second [n, I]."""


class ExpertForm(NamedTuple):
    """The way a module of experts computes with its matrices, `gate_up_proj`, or `up_proj`, and `down_proj`."""

    is_transposed: bool
    """Whether these are [E, in, out]; else [E, out, in]."""
    has_bias: bool
    """Whether `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, H] are added to the products."""
    gate: Gate | None
    """The module's own method between the two products; None: silu(gate) * up, first the columns of gate."""
    has_gate: bool = True
    """Whether the first matrix has 2I columns; else it is `up_proj`, and `gate` the activation of its I columns."""
    has_identities: bool = False
    """Whether the last experts return their input: `gate_up_proj` has matrices for them, which are not read, and
    `down_proj` has none."""

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the two matrices."""
        return tuple(EXPERT_MATRICES if self.has_gate else _PLAIN_MATRICES)


_GATED = ExpertForm(is_transposed=False, has_bias=False, gate=None)


class _Routed(NamedTuple):
    """Results of a router, the k experts of each token in the order of their numbers."""

    logits: Tensor
    weights: Tensor
    experts: Tensor
    bias: Tensor
    """[E], with which they were chosen; zeros if the router has none."""

    @classmethod
    def of(cls, logits: Tensor, weights: Tensor, experts: Tensor, bias: Tensor) -> "_Routed":
        order = experts.argsort(dim=-1)
        return cls(logits, weights.gather(-1, order), experts.gather(-1, order), bias)


class _RouterTrial(NamedTuple):
    """A router to be run with other weights and biases."""

    child: nn.Module
    top_k: int
    num_experts: int
    dtype: torch.dtype
    """That of its weight."""
    bias_name: str | None
    takes_bias: bool
    """Whether the caller of its forward gives the bias."""

    @classmethod
    def of(cls, child: nn.Module) -> "_RouterTrial | None":
        """None if `child` does not look like a router."""
        weight, top_k = getattr(child, "weight", None), getattr(child, "top_k", None)
        if not isinstance(top_k, int) or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            return None
        own = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        others = {name: tensor for name, tensor in own if name != "weight"}
        takes_bias, count = len(inspect.signature(child.forward).parameters) == 2, len(weight)
        is_known = not list(child.children()) and len(others) + takes_bias <= 1 and top_k <= count <= _MOST_EXPERTS
        if not is_known or any(tensor.shape != (count,) for tensor in others.values()):
            return None
        return cls(child, top_k, count, weight.dtype, next(iter(others), None), takes_bias)

    @property
    def has_bias(self) -> bool:
        return self.takes_bias or self.bias_name is not None

    @torch.no_grad()
    def run(self, x: Tensor, weight: Tensor, bias: Tensor) -> _Routed | None:
        """The router's results for x [T, H] with these weights [E, H]; None if it does not run, or returns others."""
        tensors: dict[str, Any] = {"weight": weight.to(self.dtype)}
        if self.bias_name is not None:
            tensors[self.bias_name] = bias = bias.to(tensor_of(self.child, self.bias_name).dtype)
        parameters, buffers = vars(self.child)["_parameters"], vars(self.child)["_buffers"]
        own: dict[str, Any] = {
            "_parameters": {name: tensors.get(name, tensor) for name, tensor in parameters.items()},
            "_buffers": {name: tensors.get(name, tensor) for name, tensor in buffers.items()},
        }
        trial = copy_with(self.child, **own, **_NO_HOOKS, hidden_dim=x.shape[1])
        try:
            found = trial.forward(x.to(self.dtype), *([bias] if self.takes_bias else []))
        except Exception:  # foreign modules may fail in any way: then they are not recognised
            return None
        shapes = [(len(x), self.num_experts), *[(len(x), self.top_k)] * 2]
        if not isinstance(found, tuple) or [getattr(each, "shape", None) for each in found] != shapes:
            return None
        logits, weights, experts = found
        return _Routed.of(logits, weights, experts, bias if self.has_bias else torch.zeros(self.num_experts))

    def distinct(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, weights and bias for which the logits of a token are different numbers, exact in any dtype."""
        half = -(-self.num_experts // 2)
        bits = 0x3E80 + torch.arange(half) * (512 // half)  # of bfloat16 numbers from 0.25 to 4
        positive = bits.to(torch.int16).view(torch.bfloat16).float()
        numbers = torch.cat([positive, -positive])[: self.num_experts]
        order = _waves(_COLUMNS, self.num_experts, dtype=torch.float32).argsort(dim=1)
        eye = torch.eye(_COLUMNS)
        return torch.cat([eye, -eye, eye / 2]), numbers[order].t().contiguous(), self._bias()

    def _bias(self) -> Tensor:
        return _waves(self.num_experts, dtype=torch.float32) * 0.6

    def is_precise(self) -> bool | None:
        """Whether logits are float32 sums; False if they have the rounding of the weights, None if they are others."""
        x, weight = self._rows()
        found = self.run(x, weight, self._bias())
        if found is None:
            return None
        exact = F.linear(x.float(), weight.float())
        if torch.allclose(found.logits.float(), exact, rtol=1e-5, atol=1e-4):
            return self.dtype != torch.float32
        return False if same(found.logits.to(self.dtype), F.linear(x, weight)) else None

    def _rows(self) -> tuple[Tensor, Tensor]:
        """x [T, H] of small and of large numbers, and weights, whose products no dtype but float32 holds."""
        x = _waves(24, _COLUMNS, dtype=self.dtype) * 4
        return torch.cat([x, x * LARGE]), _waves(self.num_experts, _COLUMNS, dtype=self.dtype)

    def choices(self, precise: bool) -> Iterator[Routing]:
        """Ways to choose that the numbers of the router allow."""
        counts = {value for value in vars(self.child).values() if type(value) is int and value > 1}
        groups: list[Groups | None] = [None]
        for num, num_chosen, sums_two in itertools.product(sorted(counts), sorted({1, *counts}), (True, False)):
            size = self.num_experts // num
            if self.num_experts % num == 0 and num_chosen < num and num_chosen * size >= self.top_k and size > 1:
                groups.append(Groups(num, num_chosen, sums_two))
        for sigmoid, each in itertools.product((False, True), groups):
            yield Routing(False, False, sigmoid, precise, each)

    def chooses(self, routing: Routing, found: _Routed) -> bool:
        """Whether `routing` chooses the same experts."""
        return torch.equal(self._select_by(routing, found).experts, found.experts)

    def _select_by(self, routing: Routing, found: _Routed) -> _Routed:
        bias = found.bias if self.has_bias else None
        chosen = routing.select(found.logits.float(), self.top_k, bias=bias, dtype=self.dtype)
        return _Routed.of(found.logits, *chosen, found.bias)

    def find_weighting(self, routing: Routing, found: _Routed) -> Routing | None:
        """`routing` with the weights that were found; None if there is no such formula."""
        numbers = sorted({float(each) for each in vars(self.child).values() if type(each) in (int, float) and each > 0})
        rounded = found.weights.dtype == self.dtype
        for normalised, scaling in itertools.product((True, False), (1.0, *numbers)):
            tried = routing._replace(normalised=normalised, rounded=rounded, scaling=scaling)
            if same(found.weights, self._select_by(tried, found).weights):
                return self._with_floor(tried, numbers) if normalised else tried
        return None

    def _with_floor(self, routing: Routing, numbers: list[float]) -> Routing | None:
        """`routing` with the numbers that keep a very small sum of scores from dividing; None if they are unknown.

        Chosen are the first experts, with scores of e^-64 or less, because of their bias, or because all are alike.
        """
        if not self.has_bias and not routing.sigmoid:
            return routing  # the largest of a softmax are not small
        weight, bias = torch.zeros(self.num_experts, _COLUMNS), torch.zeros(self.num_experts)
        weight[: self.top_k if self.has_bias else None, 0] = -64.0
        bias[: self.top_k] = 10.0
        found = self.run(torch.eye(_COLUMNS)[:1], weight, bias)
        if found is None:
            return None
        for added, least in ((0.0, 0.0), *((number, 0.0) for number in _ADDED), *((0.0, number) for number in numbers)):
            tried = routing._replace(added=added, least=least)
            if torch.allclose(found.weights.float(), self._select_by(tried, found).weights.float(), rtol=0.02, atol=0):
                return tried
        return None

    def agrees(self, routing: Routing) -> bool:
        """Whether it does so with other numbers too, if rounding makes no logits equal."""
        if self.dtype != torch.float32 and not routing.precise:
            return True
        x, weight = self._rows()
        found = self.run(x[: len(x) // 2], weight, self._bias())  # large ones make scores equal
        if found is None:
            return False
        ours = self._select_by(routing, found)
        return torch.equal(ours.experts, found.experts) and same(found.weights, ours.weights)


def are_gated_experts(child: nn.Module) -> bool:
    """Whether `child` weights and adds down(silu(gate(x)) * up(x)) of the experts chosen for each token."""
    return expert_form(child) == _GATED


def expert_form(child: nn.Module) -> ExpertForm | None:
    """The form of a module that weights and adds the outputs of the experts chosen for each token; None of others."""
    if _has_parameters(child, _PLAIN_MATRICES):
        form = ExpertForm(is_transposed=False, has_bias=False, gate=_activate, has_gate=False)
        return form if isinstance(getattr(child, "act_fn", None), nn.Module) and _computes(child, form) else None
    has_bias = _has_parameters(child, EXPERT_MATRICES | EXPERT_BIASES)
    if not has_bias and not _has_parameters(child, EXPERT_MATRICES):
        return None
    num_first, num_second = (len(tensor_of(child, name)) for name in EXPERT_MATRICES)
    activations = [each for each in child.children() if type(each) is not nn.Identity]
    is_silu = len(activations) == 1 and type(activations[0]) in SILU_CLASSES
    is_silu = is_silu or (not activations and getattr(child, "act_fn", None) is F.silu)
    gates = [None] * is_silu + [gate for gate in [getattr(type(child), "_apply_gate", None)] if gate is not None]
    forms = (
        ExpertForm(is_transposed, has_bias, gate, has_identities=num_first > num_second)
        for is_transposed, gate in itertools.product((False, True), gates)
    )
    return next((form for form in forms if _computes(child, form)), None)


def _activate(experts: Any, projected: Tensor) -> Tensor:
    activated: Tensor = experts.act_fn(projected)
    return activated


def _computes(child: nn.Module, form: ExpertForm) -> bool:
    """Whether a small copy of `child` computes in its form."""
    trial, dtype = _small_experts(child, form), tensor_of(child, "down_proj").dtype
    gate_up, down = (
        tensor_of(trial, name).mT if form.is_transposed else tensor_of(trial, name) for name in form.matrices
    )
    biases = [tensor_of(trial, name) for name in EXPERT_BIASES] if form.has_bias else []
    gate = None if form.gate is None else partial(form.gate, trial)
    index = torch.arange(48).view(24, 2).mul(7).remainder(_NUM_EXPERTS)
    index[:, 1] = (index[:, 0] + 1 + index[:, 1] % 3) % _NUM_EXPERTS
    x, weights = _waves(24, _HIDDEN, dtype=dtype), _waves(24, 2, dtype=dtype).abs()

    def compute(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return mixed(x, index, weights, gate_up, down, biases, gate)

    return agree(trial, compute, x, index, weights) and agree(trial, compute, x * LARGE, index, weights)


def _small_experts(child: nn.Module, form: ExpertForm) -> nn.Module:
    num_columns = 2 * _INTERMEDIATE if form.has_gate else _INTERMEDIATE
    num_second = _NUM_EXPERTS - 2 * form.has_identities
    gate_up, down = (_NUM_EXPERTS, num_columns, _HIDDEN), (num_second, _HIDDEN, _INTERMEDIATE)
    dtype = tensor_of(child, "down_proj").dtype
    small = {name: _waves(*shape, dtype=dtype) for name, shape in zip(form.matrices, (gate_up, down), strict=True)}
    if form.has_bias:
        small |= {
            name: _waves(*shape[:2], dtype=dtype) for name, shape in zip(EXPERT_BIASES, (gate_up, down), strict=True)
        }
    if form.is_transposed:
        small |= {name: small[name].mT.contiguous() for name in form.matrices}
    sizes = {"num_experts": _NUM_EXPERTS, "hidden_dim": _HIDDEN, "intermediate_dim": _INTERMEDIATE}
    sizes |= {"total_experts": _NUM_EXPERTS, "num_routed_experts": num_second}
    config = SimpleNamespace(_experts_implementation="eager")
    return copy_with(child, _parameters=small, config=config, **_NO_HOOKS, **sizes)


def _has_parameters(child: nn.Module, dimensions: dict[str, int]) -> bool:
    """Whether these are its own parameters, and it has no buffers."""
    own = {name: p.dim() for name, p in child.named_parameters(recurse=False)}
    return own == dimensions and not list(child.buffers(recurse=False))


def _waves(*shape: int, dtype: torch.dtype) -> Tensor:
    """Fixed irregular numbers in (-0.5, 0.5); nothing is drawn from torch's generator."""
    return torch.arange(math.prod(shape)).view(shape).square().mul(0.37).sin().mul(0.5).to(dtype)
