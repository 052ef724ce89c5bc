"""Common parts of the trials of mixers: functions over tokens that are replaced, and checks of their arguments."""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from rollout_engine.model.modules.forward_trial import require, require_same
from rollout_engine.model.modules.geometry import HARMLESS_TENSORS
from rollout_engine.model.modules.module_patterns import copy_with

CONVOLUTION = "causal_conv1d_fn"
"""Name of the convolution in modelling files of transformers."""
_HARMLESS = HARMLESS_TENSORS | {"cu_seqlens"}


def with_functions(mixer: nn.Module, functions: dict[str, Callable[..., Any]]) -> nn.Module:
    """A copy of `mixer` whose class calls these functions over tokens, by their names in its file."""
    forward: Any = inspect.unwrap(type(mixer).forward)
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    kind: Any = type(mixer)
    copy = copy_with(mixer)
    copy.__class__ = type(kind.__name__, (kind,), {"forward": own, "__module__": kind.__module__})
    return copy


def projection(given: Tensor, result: Tensor) -> Callable[[Tensor], Tensor]:
    """Replaces a linear of the mixer's input `given`, and returns a copy of `result`."""

    def run(x: Tensor) -> Tensor:
        require_same(x, given, "projects another input than its own")
        return result.clone()

    return run


def check_convolution(own: Any, weight: Tensor, bias: Tensor | None, others: dict[str, Any]) -> None:
    """Raise `Mismatch` unless a convolution has the weight and bias of the module `own`, and harmless arguments."""
    is_own = weight.data_ptr() == own.weight.data_ptr() and weight.shape == own.weight.squeeze(1).shape
    require(is_own, "convolves with another weight")
    require(bias is own.bias, "convolves with another bias")
    require_harmless(others)


def require_harmless(others: dict[str, Any]) -> None:
    """Raise `Mismatch` if a function over tokens is given more than it can compute with."""
    strangers = [
        name for name, given in others.items() if given is not None and given is not False and name not in _HARMLESS
    ]
    require(not strangers, f"passes {', '.join(strangers)} to a function over tokens")
