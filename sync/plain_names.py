"""Names of weights as the plain model has them, whatever a trainer has wrapped around its modules."""

import re

from sync.errors import ManifestMismatch

_ANYWHERE = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Prefixes that torch.compile, FSDP1 and activation checkpointing add, also within a name."""
_IN_FRONT = ("module.", "base_model.model.")
"""Prefixes that DistributedDataParallel (and DeepSpeed) and PEFT add to every name."""
_OF_ADAPTERS = re.compile(r"\.(base_layer|lora_[AB]|lora_embedding_[AB]|modules_to_save|original_module)\.")
_COMPUTED = re.compile(r"(^|\.)parametrizations\.|_orig$")
"""Names of tensors from which torch computes a weight: `nn.utils.parametrize`, and `nn.utils.prune`."""


def without_wrappers(name: str) -> str:
    """A name without the prefixes that wrappers of single modules add."""
    return _ANYWHERE.sub("", name)


def plain_names(names: list[str]) -> list[str]:
    """Names without the prefixes of wrappers.

    Raises `ManifestMismatch` for names of something else than the weights of a model, with the object to pass instead.
    """
    if "n_averaged" in names and any(name.startswith("module.") for name in names):
        what = "'n_averaged' is a name in the state dict of a torch.optim.swa_utils.AveragedModel"
        raise ManifestMismatch(f"{what}: pass that model itself, or its .module.")
    plain = [without_wrappers(name) for name in names]
    while prefix := next((p for p in _IN_FRONT if plain and all(name.startswith(p) for name in plain)), None):
        plain = [name.removeprefix(prefix) for name in plain]
    for name in plain:
        if _OF_ADAPTERS.search(name):
            what = (
                f"'{name}' is a name in the state dict of a model with adapters (PEFT), which does not say how to merge"
            )
            raise ManifestMismatch(f"{what}: pass the model itself, and its adapters are merged into the update.")
        if _COMPUTED.search(name):
            what = f"'{name}' is not a weight, but what torch computes one from (a parametrization, or pruning)"
            fix = "torch.nn.utils.parametrize.remove_parametrizations, or torch.nn.utils.prune.remove"
            raise ManifestMismatch(f"{what}: send a copy of the model that has been through {fix}.")
    return plain
