"""Mixers: layers that keep a state in place of keys and values. They keep the forward of their own class.

    forward of BambaMixer     in_proj -> causal_conv1d_fn -> mamba2_chunk_scan -> norm -> out_proj
    here                      the same code, in which the names of `mixer_functions.FUNCTIONS` are functions of ours

A module is recognised by the globals that the code of its forward names. Its convolution is a part of it, whose
weight that code reads. Parameters and their names stay as they are.
"""

import inspect
from collections.abc import Iterator
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.state_kernels import StateKernels
from rollout_engine.model.modules.mixer_functions import FUNCTIONS, give_kernels, given_positions, running

_WITH_CACHE = {
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
}
"""Functions that mixers call with a cache alone, which they are not given."""
_STATELESS = {"apply_mask_to_padding_states"}
"""Functions that treat each token separately."""
_CACHES = ("cache_params", "past_key_values")


class Mixer(nn.Module):
    """Mixed into the class of a module whose functions over tokens are ours."""


class MixerConvolution(nn.Conv1d):
    """The convolution of a mixer, whose weight [C, 1, W] and bias [C] the mixer reads."""

    def forward(self, input: Tensor) -> Tensor:
        raise ConfigError("The convolution of a mixer was called, and here the mixer computes it. Call the mixer.")


def swap_mixers(module: nn.Module) -> None:
    """Have every mixer below `module` call our functions over tokens, in place."""
    for parent in list(module.modules()):
        for child in list(parent.children()):
            if not isinstance(child, Mixer) and is_mixer(child):
                _swap(child, parent)


def mixers_of(module: nn.Module) -> list[nn.Module]:
    """The mixers below `module` that call our functions."""
    return [child for child in module.modules() if isinstance(child, Mixer)]


def use_state_kernels(module: nn.Module, kernels: StateKernels) -> None:
    """Have every mixer below `module` that calls our functions compute by a device's `kernels`, in place."""
    for mixer in mixers_of(module):
        give_kernels(mixer, kernels)


def is_mixer(module: nn.Module) -> bool:
    """Whether the forward of a module's class names a function that ours replace, and no other one over tokens."""
    names = _functions_of(module)
    return not names.isdisjoint(FUNCTIONS) and names <= FUNCTIONS.keys() | _WITH_CACHE | _STATELESS


def unserved_mixers(module: nn.Module) -> list[str]:
    """Modules below `module` that compute over tokens by functions that are not replaced, as text for an error."""
    found: dict[str, str] = {}
    for child in module.modules():
        names = _functions_of(child) - _WITH_CACHE - _STATELESS
        others = sorted(names - FUNCTIONS.keys())
        if not isinstance(child, Mixer) and (others or names) and _has_convolution(child):
            found[type(child).__name__] = f"{type(child).__name__} calls {', '.join(others or sorted(names))}"
    return list(found.values())


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def _swap(mixer: nn.Module, parent: nn.Module) -> None:
    kind: Any = type(mixer)  # mypy does not see that classes can be hashed
    mixer.__class__ = _mixer_class(kind)
    for child in mixer.children():
        if type(child) is nn.Conv1d:
            child.__class__ = MixerConvolution
    takes_positions = "position_ids" in inspect.signature(type(parent).forward).parameters
    if takes_positions and not isinstance(parent, _LayerWithMixer):
        parent.__class__ = _layer_class(type(parent))  # type: ignore[arg-type]  # mypy doubts that it has a hash


class _LayerWithMixer(nn.Module):
    """Mixed into the class of a decoder layer: it leaves the positions that it is given to its mixer."""


@cache
def _layer_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like `kind` whose forward leaves its positions, also when checkpointing of gradients runs it again."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with given_positions(kwargs.get("position_ids")):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (_LayerWithMixer, kind), {"forward": forward, "__module__": kind.__module__})


@cache
def _mixer_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like `kind` whose forward is the same code with our functions."""
    forward: Any = inspect.unwrap(kind.forward)
    ours = {name: function for name, function in FUNCTIONS.items() if name in forward.__globals__}
    own = FunctionType(
        forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__

    @wraps(own)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name in _CACHES:  # which attention would fill, and refuses to read
            if name in kwargs:
                kwargs[name] = None
        with running(self):
            return own(self, *args, **kwargs)

    return type(kind.__name__, (Mixer, kind), {"forward": run, "__module__": kind.__module__})


def _functions_of(module: nn.Module) -> set[str]:
    """Names of the functions of its own file, or of others in it, that the forward of a module's class calls."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return set()
    own = forward.__globals__
    found = {name for name in _names_in(code) if isinstance(own.get(name), FunctionType)}
    return {name for name in found if own[name].__module__ == forward.__module__ or name in FUNCTIONS}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
