"""Checks of the parts of a module that a fused decoder is to run; each raises `UnsupportedStructure` with a reason."""

from collections.abc import Iterable

from torch import Tensor, nn

from rollout_engine.model.packing.module_types import tensor_of


class UnsupportedStructure(Exception):
    """Why the layers of a module must run as modules."""


def require(condition: bool, otherwise: str) -> None:
    """Raise `UnsupportedStructure` with the reason `otherwise`, unless `condition` holds."""
    if not condition:
        raise UnsupportedStructure(otherwise)


def require_pattern(reason: str | None) -> None:
    """Raise `UnsupportedStructure` with `reason`, the result of a trial in `layer_patterns`, unless it is None."""
    if reason is not None:
        raise UnsupportedStructure(reason)


def require_no_tensors(module: nn.Module) -> None:
    """Raise `UnsupportedStructure` if a module has tensors that are not its children's."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    require(not own, f"{kind_of(module)} has tensors of its own")


def check_linears(linears: Iterable[nn.Module]) -> None:
    """Raise `UnsupportedStructure` unless all are linear layers with values."""
    for child in linears:
        require(isinstance(child, nn.Linear), "its projections are not linear layers")
        check_values(tensor_of(child))


def check_values(weight: Tensor) -> None:
    """Raise `UnsupportedStructure` if the first row of a weight has zeros alone."""
    # Both ways to compute a product with zeros agree, so a trial would prove nothing.
    require(bool(weight[0].any()), "its weights are zeros")


def kind_of(module: nn.Module) -> str:
    """The name of a module's class."""
    return type(module).__name__
