"""An output head with float32 logits in a bfloat16 model: sums are in float32 and are not rounded.

A bfloat16 logit has 8 significant bits; near 20 that is a step of 1/8, also in log-probs. Weights, hidden states and
packed copies keep their dtype: only the product's result is wider.
"""

from typing import Any

from torch import nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear


def set_float32_head(module: nn.Module, on: bool) -> None:
    """Make the head of a causal LM, after `make_row_invariant`, return float32 logits, or logits in its own dtype.

    Raises `ConfigError` if that is not possible.
    """
    group = _group_of(module)
    if on:
        _refuse_impossible(module, group)
    if group is not None and group.float32_out != on:
        group.float32_out = on
        group.unpack()


def has_float32_head(model: nn.Module) -> bool:
    """Whether `set_float32_head` is on for a causal LM, or for the model inside a wrapper."""
    owner = next((child for child in model.modules() if hasattr(child, "get_output_embeddings")), None)
    group = None if owner is None else _group_of(owner)
    return group is not None and group.float32_out


def _refuse_impossible(module: nn.Module, group: LinearGroup | None) -> None:
    device = next(module.parameters()).device
    if device.type != "cpu":
        raise ConfigError(f"fp32_head=True works on a CPU only, and the model is on {device}. Use fp32_head=False.")
    if group is None:
        raise ConfigError(
            f"fp32_head=True is not possible: the output head of {type(module).__name__} was not replaced by "
            "RowInvariantLinear. Use fp32_head=False."
        )
    if not gemm.supports(group.children[0].weight.dtype):
        raise ConfigError(
            "fp32_head=True needs the C++ kernels, and they could not be built here: install g++, or use "
            "fp32_head=False."
        )


def _group_of(module: Any) -> LinearGroup | None:
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return head._group if isinstance(head, RowInvariantLinear) else None
