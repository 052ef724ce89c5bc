"""Merges PEFT adapters for the engine: each adapted weight is sent as base + adapter.

PEFT's own `merge` does it, in a copy of the layer: the result has the bits of `merge_and_unload`, and the trainer's
weights are not touched. PEFT itself is not imported: its layers are recognised by their attributes.
"""

import copy
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sync.errors import ManifestMismatch
from sync.lazy_tensor import LazyTensor, gather_whole, is_sharded
from sync.plain_names import without_wrappers
from sync.sendable import check_sendable

logger = logging.getLogger("sync")

_TRAIN_OTHERS = "train adapters that PEFT can merge, such as plain LoRA, or send the base model's weights"

_warned: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models for which the warning about merging has been logged."""


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of `model` has an adapter, or a trained copy of itself.

    Raises `ManifestMismatch` for adapters that no weights can express (prompts, and those that depend on the input).
    """
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, Mapping) else ():
            _check_mergeable(name, config)
    return any(_is_adapted(module) or _has_trained_copy(module) for module in model.modules())


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor | LazyTensor]]:
    """The state of `model` under its base model's names, active adapters merged. Logs a warning once for each model."""
    modules = {
        without_wrappers(name): module
        for name, module in model.named_modules()
        if _is_adapted(module) or _has_trained_copy(module)
    }
    tuners = [f"{without_wrappers(name)}.".removeprefix(".") for name, each in model.named_modules() if _is_tuned(each)]
    layers: dict[int, _MergedLayer] = {}
    for full_name, tensor in model.state_dict(keep_vars=True).items():
        name = without_wrappers(full_name)
        if any(name.startswith(f"{t}base_model.") and not name.startswith(f"{t}base_model.model.") for t in tuners):
            continue  # a part that all adapters of a model share
        path = next((path for path in _parents(name) if path in modules), None)
        if path is None:
            yield name, tensor
            continue
        adapted, prefix = _source_of(modules[path])
        rest = name.removeprefix(f"{path}.")
        if not rest.startswith(prefix):
            continue  # part of an adapter, or not used now
        plain = f"{path}.{rest.removeprefix(prefix)}"
        if not any(map(_has_to_merge, adapted)):
            yield plain, tensor
        else:
            _warn_once(model)
            layer = layers.setdefault(id(adapted[0]), _MergedLayer(path, adapted))
            yield plain, _Merged(layer, rest.removeprefix(prefix), tensor)


def has_merged(tensors: Iterable[Tensor | LazyTensor]) -> bool:
    """Whether any of a source's tensors has an adapter merged into it."""
    return any(isinstance(tensor, _Merged) for tensor in tensors)


class _Merged(LazyTensor):
    """One tensor of a layer after its merge."""

    def __init__(self, layer: "_MergedLayer", name: str, base: Tensor) -> None:
        super().__init__(tuple(base.shape), base.dtype)
        self._layer, self._name = layer, name
        self.is_collective = layer.is_collective

    def materialize(self) -> Tensor:
        """Merge the layer's adapters, in a copy. Raises `ManifestMismatch` if PEFT cannot, and `GatherFailed`."""
        self.was_begun = True
        return self._layer.take(self._name)


class _MergedLayer:
    """A layer with adapters, one around the other if it has several; merging gives all of its tensors at once."""

    def __init__(self, path: str, adapted: list[Any]) -> None:
        self._path, self._adapted = path, adapted
        for name, tensor in adapted[0].state_dict(keep_vars=True).items():
            check_sendable(f"{path}.{without_wrappers(name)}", tensor)
        self.is_collective = any(is_sharded(parameter) for parameter in adapted[0].parameters())
        self._merged: dict[str, Tensor] = {}
        self._merging = threading.Lock()

    def take(self, name: str) -> Tensor:
        """The merged tensor called `name` in the base layer; each can be taken once per merge."""
        with self._merging:
            if name not in self._merged:
                self._merged = self._merge()
            return self._merged.pop(name)

    @torch.no_grad()
    def _merge(self) -> dict[str, Tensor]:
        layer: Any = _copy_of(self._adapted[0], {})  # outside of the try: gathers have errors of their own
        try:
            for _ in self._adapted:
                if layer.disable_adapters:
                    layer.unmerge()
                elif _has_to_merge(layer):
                    layer.merge()
                layer = layer.base_layer
        except Exception as problem:  # PEFT's methods have refusals of many kinds
            what = f"The adapters of '{self._path}' cannot be merged ({type(problem).__name__}: {problem})"
            raise ManifestMismatch(f"{what}: {_TRAIN_OTHERS}.") from problem
        return {without_wrappers(name): tensor.detach() for name, tensor in layer.state_dict().items()}


def _is_adapted(module: Any) -> bool:
    """Whether it is a layer with adapters around its `base_layer`."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) and callable(getattr(module, "merge", None))


def _has_trained_copy(module: Any) -> bool:
    """Whether it is a wrapper that runs either the original layer or a trained copy of it."""
    return isinstance(getattr(module, "original_module", None), nn.Module) and hasattr(module, "active_adapters")


def _is_tuned(module: Any) -> bool:
    """Whether it holds the model with adapters as `base_model.model`."""
    tuner = module._modules.get("base_model")
    return hasattr(module, "peft_config") and tuner is not None and "model" in tuner._modules


def _check_mergeable(name: str, config: Any) -> None:
    kind = getattr(config, "peft_type", None)
    kind = getattr(kind, "value", kind)
    if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
        what = f"Adapter '{name}' ({kind}) trains a prompt, which cannot be merged into weights"
        raise ManifestMismatch(f"{what}: send the base model, and put the prompt into requests.")
    if kind == "XLORA":
        what = f"Adapter '{name}' (XLORA) weighs its adapters anew for every token, so no weights equal it"
        raise ManifestMismatch(f"{what}: {_TRAIN_OTHERS}.")


def _source_of(module: Any) -> tuple[list[Any], str]:
    """The layers around the one that is sent, outermost first, and the prefix of its names within `module`."""
    inner, prefix = module, ""
    if not _is_adapted(module):
        if _is_adapted(getattr(module, "token_adapter", None)):
            path = "token_adapter"
        else:
            active = [] if module.disable_adapters else list(module.active_adapters)
            trained = [name for name in active if name in getattr(module, "modules_to_save", ())]
            path = f"modules_to_save.{trained[0]}" if trained else "original_module"
        inner, prefix = module.get_submodule(path), f"{path}."
    adapted = []
    while _is_adapted(inner):
        adapted.append(inner)
        inner, prefix = inner.base_layer, f"{prefix}base_layer."
    return adapted, prefix


def _has_to_merge(layer: Any) -> bool:
    """Whether the base layer's weights differ from those that the layer computes with."""
    if layer.disable_adapters:
        return bool(layer.merged)
    return bool(layer.active_adapters) and not layer.merged


def _parents(name: str) -> Iterator[str]:
    """ "a.b.c" -> "a", "a.b"."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def _copy_of(module: nn.Module, made: dict[int, Any]) -> Any:
    """A copy with whole tensors of its own, for methods that change them. It cannot be run.

    FSDP2's modules cannot be copied otherwise: the copy has the class of the module before it was sharded. `made` maps
    the id of each original tensor to its copy.
    """
    classes = type(module).__mro__
    sharded = [i for i, each in enumerate(classes) if each.__name__ == "FSDPModule"]
    twin: Any = object.__new__(classes[sharded[0] + 1] if sharded else classes[0])
    twin.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(module).items()
    }
    for tensors in (twin._parameters, twin._buffers):
        tensors |= {name: _whole_copy(t, made) for name, t in tensors.items() if t is not None}
    twin._modules |= {name: _copy_of(child, made) for name, child in module._modules.items() if child is not None}
    return twin


def _whole_copy(tensor: Tensor, made: dict[int, Any]) -> Tensor:
    if id(tensor) not in made:
        whole = gather_whole(tensor) if is_sharded(tensor) else tensor.detach()
        whole = whole.clone()
        made[id(tensor)] = nn.Parameter(whole, requires_grad=False) if isinstance(tensor, nn.Parameter) else whole
    copied: Tensor = made[id(tensor)]
    return copied


def _warn_once(model: nn.Module) -> None:
    if model in _warned:
        return
    _warned.add(model)
    logger.warning(
        "The model's active adapters (PEFT) are merged into the weights that are sent; its own are not touched. Its "
        "forward adds an adapter's product instead, which rounds otherwise: log-probs agree to the bit only while it "
        "is merged as well, between merge_adapter() and unmerge_adapter(). An engine with max_loras takes the adapter "
        "alone, and computes as exact.enable(model) does: update_weights(model, merge=False)."
    )
