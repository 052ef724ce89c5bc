"""Builds a Hugging Face module from its configuration: empty parameters, tied, with computed buffers."""

import copy
import itertools

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

_KINDS = {
    None: AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


def construct(
    config: PretrainedConfig, *, dtype: torch.dtype, attention: str, head: str | None = None
) -> PreTrainedModel:
    """A causal LM in eval mode, without gradients, on the CPU. Its parameters are uninitialised memory.

    `head`: "sequence" or "token": with a head that classifies in place of the output head. `attention` names a
    registered attention function. `config` is not changed; the module has its own copy.
    """
    with torch.device("meta"):
        module = _KINDS[head].from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation="eager",
            trust_remote_code=False,
        )
    module.to_empty(device="cpu")
    module.tie_weights()
    with torch.no_grad():
        for buffer in filter(torch.is_floating_point, module.buffers()):
            buffer.fill_(torch.nan)  # the self-check finds buffers that nothing computes
        for child in module.modules():
            if next(child.buffers(recurse=False), None) is not None:  # rotary frequencies, which no checkpoint has
                module._init_weights(child)
    return module.eval().requires_grad_(False)


def place_on(module: PreTrainedModel, device: torch.device, *, keep_values: bool = False) -> None:
    """Move to `device`; ties stay. Parameters get uninitialised memory, unless `keep_values`."""
    if not keep_values:
        for parameter in module.parameters():
            parameter.data = torch.empty_like(parameter, device=device)
    module.to(device)


@torch.no_grad()
def initialize(module: PreTrainedModel, *, seed: int = 0) -> None:
    """Fill stored tensors as the architecture initialises them (matrices normal, norms one), the rest with 0.5.

    The same seed gives the same weights.
    """
    stored = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    for tensor in stored:
        tensor.fill_(torch.nan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for child in module.modules():
            if next(itertools.chain(child.parameters(recurse=False), child.buffers(recurse=False)), None) is not None:
                module._init_weights(child)
    for tensor in stored:
        tensor.nan_to_num_(nan=0.5)
