"""The state of a model that a trainer has wrapped: compiled, averaged, sharded, or with adapters."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sync.adapters import has_adapters, merged_state
from sync.errors import ManifestMismatch
from sync.lazy_tensor import LazyTensor


def state_of(module: nn.Module) -> Iterable[tuple[str, Tensor | LazyTensor]]:
    """The names and values of a module, which may be wrapped, compiled, sharded or have adapters.

    Raises `ManifestMismatch` for combinations that cannot be read.
    """
    if isinstance(module, AveragedModel):
        module = module.module
    is_fsdp1 = any("_fsdp_wrapped_module" in child._modules for child in module.modules())
    if has_adapters(module):
        if is_fsdp1:
            what = "A model with adapters (PEFT) under FSDP1 cannot be merged layer by layer"
            how = "Shard it by fully_shard (FSDP2; with Accelerate, fsdp_version=2)"
            raise ManifestMismatch(f"{what}. {how}.")
        return merged_state(module)
    return _gathered_state(module) if is_fsdp1 else module.state_dict(keep_vars=True).items()


def _gathered_state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The state of a module under FSDP1. Every rank has to call this: all of it is gathered at once."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return state.items()
