"""Builds a Hugging Face module from its configuration: empty parameters, tied, with computed buffers."""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation

from rollout_engine.model.modules.text_head import text_model_with_head

_KINDS = {
    None: AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


def construct(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attention: str,
    head: str | None = None,
    check: Callable[[PreTrainedModel], None] = lambda module: None,
) -> PreTrainedModel:
    """A causal LM in eval mode, without gradients, on the CPU. Its parameters are uninitialised memory.

    `dtype`: as for `from_pretrained(dtype=...)`, which keeps some tensors of some architectures in float32.
    `head`: "sequence" or "token": with a head that classifies in place of the output head. `attention` names a
    registered attention function. `check` is called with the module before its parameters have memory, and may raise.
    `config` is not changed; the module has its own copy.
    """
    own = None if head is not None else text_model_with_head(config)
    with torch.device("meta"):
        module: PreTrainedModel = (own._from_config if own is not None else _KINDS[head].from_config)(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation="eager",
            **({} if own is not None else {"trust_remote_code": False}),
        )
    check(module)
    allocate(module, dtype)
    module.tie_weights()
    return module


def allocate(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a module on meta uninitialised memory on the CPU, with the dtypes that `from_pretrained(dtype=...)` gives.

    Buffers are computed. It is in eval mode then, without gradients.
    """
    _apply_dtype_plan(module, dtype)
    give_memory(module, module)
    module.eval().requires_grad_(False)


@torch.no_grad()
def give_memory(owner: PreTrainedModel, *parts: nn.Module) -> None:
    """Give parts of `owner` uninitialised memory on the CPU, and compute their buffers."""
    for part in parts:
        part.to_empty(device="cpu")
        for buffer in filter(torch.is_floating_point, part.buffers()):
            buffer.fill_(torch.nan)  # the self-check finds buffers that nothing computes
        for model, child in _with_models(owner, part):
            if next(child.buffers(recurse=False), None) is not None:  # rotary frequencies, which no checkpoint has
                model._init_weights(child)
        for model, child in list(_with_models(owner, part)) if _lacks_values(part) else ():
            if _lacks_values(child):  # of buffers that a module above theirs computes
                model._init_weights(child)


def _with_models(owner: PreTrainedModel, part: nn.Module) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Every module of `part`, and the model that initialises it: the innermost around it, as transformers does.

    The parts of a composite are models of their own.
    """
    model = part if isinstance(part, PreTrainedModel) else owner
    yield model, part
    for child in part.children():
        yield from _with_models(model, child)


def _lacks_values(module: nn.Module) -> bool:
    return any(bool(buffer.isnan().any()) for buffer in module.buffers() if buffer.is_floating_point())


def _apply_dtype_plan(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give stored tensors the dtypes that `from_pretrained` gives them: it reads the plan as it loads, not before."""
    plan = module._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, pattern_of_group, _ = build_glob_alternation(list(plan))
    for name, owner, key, tensor in list(_stored(module)):
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None and tensor.is_floating_point():
            planned = tensor.to(plan[pattern_of_group[match.lastgroup]])
            setattr(owner, key, nn.Parameter(planned) if isinstance(tensor, nn.Parameter) else planned)


def _stored(module: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, module that has it, its name there, tensor) of every tensor that checkpoints have."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        path, _, key = name.rpartition(".")
        yield name, module.get_submodule(path), key, tensor


def place_on(module: PreTrainedModel, device: torch.device, *, keep_values: bool = False) -> None:
    """Move to `device`; ties stay. Parameters get uninitialised memory, unless `keep_values`."""
    if not keep_values:
        for parameter in module.parameters():
            parameter.data = torch.empty_like(parameter, device=device)
    module.to(device)  # type: ignore[arg-type]  # transformers types it as of a module alone


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
        for model, child in _with_models(module, module):
            if next(itertools.chain(child.parameters(recurse=False), child.buffers(recurse=False)), None) is not None:
                model._init_weights(child)
    for tensor in stored:
        tensor.nan_to_num_(nan=0.5)
