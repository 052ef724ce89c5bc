"""The state of a model that a trainer has wrapped, under plain names; and kinds of state that cannot be sent."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sync.adapters import has_adapters, merged_state
from sync.errors import ManifestMismatch
from sync.lazy_tensor import LazyTensor

_ANYWHERE = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Prefixes that torch.compile, FSDP1 and activation checkpointing add, also within a name."""
_IN_FRONT = ("module.", "base_model.model.")
"""Prefixes that DistributedDataParallel (and DeepSpeed) and PEFT add to every name."""
_OF_ADAPTERS = re.compile(r"\.(base_layer|lora_[AB]|lora_embedding_[AB]|modules_to_save|original_module)\.")


def state_of(module: nn.Module) -> Iterable[tuple[str, Tensor | LazyTensor]]:
    """The names and values of a module, which may be wrapped, compiled, sharded or have adapters.

    Raises `ManifestMismatch` for combinations that cannot be read.
    """
    is_fsdp1 = any("_fsdp_wrapped_module" in child._modules for child in module.modules())
    if has_adapters(module):
        if is_fsdp1:
            what = "A model with adapters (PEFT) under FSDP1 cannot be merged layer by layer"
            raise ManifestMismatch(f"{what}: shard it by fully_shard (FSDP2), or send merge_and_unload() of a copy.")
        return merged_state(module)
    return _gathered_state(module) if is_fsdp1 else module.state_dict(keep_vars=True).items()


def plain_names(names: list[str]) -> list[str]:
    """Names without the prefixes of wrappers. Raises `ManifestMismatch` for a state dict of a model with adapters."""
    plain = [_ANYWHERE.sub("", name) for name in names]
    while prefix := next((p for p in _IN_FRONT if plain and all(name.startswith(p) for name in plain)), None):
        plain = [name.removeprefix(prefix) for name in plain]
    for name in plain:
        if _OF_ADAPTERS.search(name):
            what = (
                f"'{name}' is a name in the state dict of a model with adapters (PEFT), which does not say how to merge"
            )
            raise ManifestMismatch(f"{what}: pass the model itself, and its adapters are merged into the update.")
    return plain


def check_sendable(name: object, tensor: object) -> None:
    """Raise `ManifestMismatch`, naming it, for anything that is not a plain tensor with data."""
    if not isinstance(name, str):
        raise ManifestMismatch(f"A weight is named {name!r}: names are strings.")
    if isinstance(tensor, LazyTensor):
        return
    if not isinstance(tensor, Tensor):
        nested = " Pass the inner dict." if isinstance(tensor, dict) else ""
        raise ManifestMismatch(f"'{name}' is {type(tensor).__name__}, not a tensor.{nested}")
    if tensor.is_meta:
        raise ManifestMismatch(f"'{name}' is on the meta device: it has no values to send.")
    if hasattr(tensor, "ds_shape") and tensor.numel() == 0:
        what = f"'{name}' is partitioned by DeepSpeed ZeRO-3: this rank has none of its values"
        raise ManifestMismatch(f"{what}. Send within deepspeed.zero.GatheredParameters(model.parameters()).")
    if type(tensor).__name__ in ("Params4bit", "Int8Params"):
        what = f"'{name}' is quantised by bitsandbytes ({type(tensor).__name__}), which engines do not read"
        raise ManifestMismatch(f"{what}: dequantise the model first (model.dequantize()).")
    if hasattr(tensor, "local_shards"):
        what = f"'{name}' is a ShardedTensor, of which this rank holds a part"
        raise ManifestMismatch(f"{what}: pass the model itself, or its full state dict.")
    if tensor.layout != torch.strided:
        raise ManifestMismatch(f"'{name}' has layout {tensor.layout}: only dense tensors travel.")


def _gathered_state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The state of a module under FSDP1. Every rank has to call this: all of it is gathered at once."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return state.items()
