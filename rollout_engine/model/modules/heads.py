"""Heads that classify, in place of the output head of a causal LM: which one a checkpoint has, and its place.

A module with such a head is a base model, and one linear on its hidden states: a row of logits for the last token of a
sequence, or for each token.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.pooling_params import PoolingInfo
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.packing.module_types import tensor_of

HeadKind = Literal["sequence", "token"]
_ENDINGS: dict[str, HeadKind] = {
    "ForSequenceClassification": "sequence",
    "ForRewardModel": "sequence",
    "ForTokenClassification": "token",
}
_REWARD = "ForRewardModel"


def head_kind_of(config: PretrainedConfig) -> HeadKind | None:
    """The head that a checkpoint's architecture names; None for a causal LM."""
    (name,) = (getattr(config, "architectures", None) or [""])[:1]
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def with_labels(config: PretrainedConfig) -> PretrainedConfig:
    """A reward model's configuration with one label, which its name promises; any other as it is."""
    (name,) = (getattr(config, "architectures", None) or [""])[:1]
    if name.endswith(_REWARD):
        config.num_labels = 1
    return config


def trunk_of(module: nn.Module) -> nn.Module:
    """The module that computes a step of `module`: the whole of a causal LM, the base model if a head classifies."""
    is_causal_lm = not isinstance(module, PreTrainedModel) or module.get_output_embeddings() is not None
    return module if is_causal_lm else cast(nn.Module, module.base_model)


def head_of(module: PreTrainedModel) -> nn.Linear | None:
    """The head that classifies; None in a causal LM."""
    if trunk_of(module) is module:
        return None
    found = [child for child in module.children() if isinstance(child, nn.Linear)]
    others = [c for c in module.children() if c is not module.base_model and not isinstance(c, nn.Linear | nn.Dropout)]
    if len(found) != 1 or others or module.base_model is module:
        raise _unknown(module, "it is more than one linear on the hidden states")
    return found[0]


def pooling_info(module: PreTrainedModel, kind: HeadKind | None) -> PoolingInfo:
    """Describe the kinds of pooling that a loaded module offers."""
    config = module.config
    names = getattr(config, "id2label", None) or {}
    return PoolingInfo(
        hidden_size=tensor_of(module.get_input_embeddings()).shape[1] if kind is None else _width(module),
        head=kind,
        labels=[] if kind is None else [str(names.get(i, f"LABEL_{i}")) for i in range(config.num_labels or 0)],
        is_multi_label=getattr(config, "problem_type", None) == "multi_label_classification",
        pad_token_id=getattr(config, "pad_token_id", None),
    )


@torch.no_grad()
def check_head(module: PreTrainedModel, kind: HeadKind) -> None:
    """Raise `ConfigError` unless transformers computes the same as `head_of` from the base model's hidden states.

    Weights must be loaded. Attention is replaced by zeros: it is not compared.
    """
    head = head_of(module)
    assert head is not None, "a module with a head that classifies"
    states, outputs = list[Tensor](), list[Tensor]()
    hooks = [
        module.base_model.register_forward_hook(lambda _, given, output: states.append(output.last_hidden_state[0])),
        module.register_forward_hook(lambda _, given, output: outputs.append(output.logits[0])),
    ]
    try:
        probe_geometry(module)
    finally:
        for hook in hooks:
            hook.remove()
    expected, ours = outputs[0], head(states[0])
    ours = ours if kind == "token" else ours[_last_real(module, len(ours))]
    if expected.shape != ours.shape or not torch.allclose(expected, ours, rtol=1e-2, atol=1e-3):
        raise _unknown(module, "transformers computes something else with it")


def _last_real(module: PreTrainedModel, num_tokens: int) -> int:
    """Which of the probe's tokens, 1, 2, ..., transformers reads a head for sequences at."""
    pad = getattr(module.config, "pad_token_id", None)
    return num_tokens - 2 if pad == num_tokens else num_tokens - 1


def _width(module: PreTrainedModel) -> int:
    head = head_of(module)
    assert head is not None, "a module with a head that classifies"
    return head.in_features


def _unknown(module: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(f"The head of {type(module).__name__} is not served: {reason}.")
