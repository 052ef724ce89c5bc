"""The MLPs and mixtures of experts of a Hugging Face module's layers, which a fused decoder can run."""

from typing import NamedTuple

from torch import nn

from rollout_engine.model.modules.mixture_patterns import MixtureParts, mixture_pattern
from rollout_engine.model.modules.module_patterns import LLAMA_MLP, MLP_NAMES, is_squared_relu, is_squared_relu_mlp
from rollout_engine.model.modules.structure_checks import (
    UnsupportedStructure,
    check_linears,
    check_values,
    kind_of,
    require,
    require_no_tensors,
    require_pattern,
)

_ROUTERS = {"gate", "router"}
_LATENTS = ("fc1_latent_proj", "fc2_latent_proj")
_EXPERTS = "experts"


class MLP(NamedTuple):
    """down(activation(gate(x)) * up(x)), or down(max(up(x), 0)^2)."""

    module: nn.Module
    gate_up: list[nn.Module]
    """Linears whose outputs, side by side, are gate and up."""
    down: nn.Module
    is_plain: bool = False
    """Whether there is no gate, and `gate_up` is up alone."""


class Mixture(NamedTuple):
    """A mixture of experts."""

    module: nn.Module
    router: nn.Module
    experts: nn.Module
    bias_name: str | None = None
    """The tensor of `module` that its router adds to scores; None: it gives the router none."""
    shared: MLP | None = None
    """Computes every token, in addition to its experts; None: nothing does."""
    shared_gate: nn.Module | None = None
    """A linear with one output, whose sigmoid multiplies the shared MLP's; None: nothing does."""
    is_plain: bool = False
    """Whether its experts are down(max(up(x), 0)^2)."""
    latents: tuple[nn.Module, nn.Module] | None = None
    """Linears before all experts but the shared one, and behind their sum; None: there are none."""


def feed_forward(children: dict[str, nn.Module]) -> MLP | Mixture:
    """The parts behind a layer's second norm, by their roles: an MLP, a mixture, or a mixture next to an MLP."""
    if "mixture" not in children:
        (only,) = children.values()
        return mlp_structure(only)
    mixture = mlp_structure(children["mixture"])
    require(isinstance(mixture, Mixture), f"{kind_of(children['mixture'])} has no experts")
    assert isinstance(mixture, Mixture), "as required"
    if "shared_mlp" not in children:
        return mixture
    shared = mlp_structure(children["shared_mlp"])
    require(isinstance(shared, MLP) and mixture.shared is None, "it has several shared experts")
    assert isinstance(shared, MLP), "as required"
    require(shared.is_plain == mixture.is_plain, "some of its experts have gates, and others none")
    return mixture._replace(shared=shared)


def mlp_structure(mlp: nn.Module) -> MLP | Mixture:
    """The parts of an MLP or a mixture. Raises `UnsupportedStructure` if it is neither."""
    children = dict(mlp.named_children())
    if _EXPERTS in children:
        return _mixture(mlp, children)
    names = next((each for each in MLP_NAMES if children.keys() >= {*each.linears}), None)
    if names is None and is_squared_relu_mlp(mlp):
        check_linears(children[name] for name in ("up_proj", "down_proj"))
        return MLP(mlp, [children["up_proj"]], children["down_proj"], is_plain=True)
    if names is None:
        raise UnsupportedStructure(f"{kind_of(mlp)} has other parts")
    require_no_tensors(mlp)
    check_linears(children[name] for name in names.linears)
    return MLP(mlp, [children[name] for name in names.gate_up], children[names.down])


def _mixture(mixture: nn.Module, children: dict[str, nn.Module]) -> Mixture:
    names = _names_of(mixture, children)
    pattern = mixture_pattern(mixture, names)
    require_pattern(pattern.reason)
    for parameter in mixture.parameters():
        if parameter.dim() > 1:
            check_values(parameter)
    shared = None if names.shared is None else mlp_structure(children[names.shared])
    assert not isinstance(shared, Mixture), "it has the parts of an MLP"
    gate = None if names.shared_gate is None else children[names.shared_gate]
    experts = children[names.experts]
    is_plain = "up_proj" in experts._parameters and is_squared_relu(getattr(experts, "act_fn", None))
    require(shared is None or shared.is_plain == is_plain, "some of its experts have gates, and others none")
    latents = None if names.latents is None else (children[names.latents[0]], children[names.latents[1]])
    check_linears(latents or ())
    return Mixture(mixture, children[names.router], experts, pattern.bias_name, shared, gate, is_plain, latents)


def _names_of(mixture: nn.Module, children: dict[str, nn.Module]) -> MixtureParts:
    """Raises `UnsupportedStructure` if `mixture` has other parts."""
    routers = sorted(_ROUTERS & children.keys())
    others = {
        name: child
        for name, child in children.items()
        if name not in (*_ROUTERS, _EXPERTS) and type(child) is not nn.Identity
    }
    has_latents = others.keys() >= {*_LATENTS}
    others = {name: child for name, child in others.items() if not (has_latents and name in _LATENTS)}
    shared = [name for name, child in others.items() if _has_linears(child) or is_squared_relu_mlp(child)]
    gates = [name for name, child in others.items() if isinstance(child, nn.Linear) and child.out_features == 1]
    is_known = len(routers) == 1 and len(gates) <= len(shared) <= 1 and len(shared) + len(gates) == len(others)
    require(is_known, f"{kind_of(mixture)} has other parts")
    latents = _LATENTS if has_latents else None
    return MixtureParts(routers[0], _EXPERTS, next(iter(shared), None), next(iter(gates), None), latents)


def _has_linears(child: nn.Module) -> bool:
    """Whether it has the linears of Llama's MLP."""
    return dict(child.named_children()).keys() >= {*LLAMA_MLP.linears}
