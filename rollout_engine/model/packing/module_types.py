"""Types that checkers cannot see in Hugging Face modules: their tensors, and classes that replace others."""

from typing import TypeVar

from torch import Tensor, nn

Kind = TypeVar("Kind", bound=nn.Module)


def tensor_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A tensor that `module` has as an attribute, a parameter or not."""
    found = getattr(module, name)
    assert isinstance(found, Tensor), "torch allows no other value there"
    return found


def become(child: nn.Module, kind: type[Kind]) -> Kind:
    """Give a module another class, in place; returns it."""
    child.__class__ = kind
    assert isinstance(child, kind), "its class was just replaced"
    return child
