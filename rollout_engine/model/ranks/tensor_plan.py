"""Which products of a module may be cut, and how: transformers' plan of its type, or one made of its structure.

A type whose layers keep states has a plan of some parts alone, or none. The parts that it leaves out then get the
styles of Llama's attention and gated MLP if they are built so; all other products give whole rows.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.expert_patterns import EXPERT_BIASES, EXPERT_MATRICES
from rollout_engine.model.modules.mixers import mixers_of
from rollout_engine.model.modules.module_patterns import is_gated_mlp

QKV = ("q_proj", "k_proj", "v_proj")
LAST = ("o_proj", "out_proj")
"""Names of the product behind attention."""
COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_FEW = 4
"""A product with fewer outputs than a part of this of its inputs costs less than gathering them."""


def plan_of(module: PreTrainedModel) -> dict[int, str]:
    """The style of each linear and of each module of experts that is cut, by the module's id.

    Linears of mixers have none. Raises `ConfigError` for a type without a plan.
    """
    base: nn.Module = getattr(module, module.base_model_prefix)
    mixers = mixers_of(base)
    plan = (
        getattr(module.config, "base_model_tp_plan", None) or getattr(module.config, "base_model_ep_plan", None) or {}
    )
    if not plan and not mixers:
        raise ConfigError(
            f"tensor_parallel_size: {type(module).__name__} cannot be cut, because transformers has no tensor-parallel "
            "plan of it (base_model_tp_plan), nor an expert-parallel one. Leave it out."
        )
    styles = [(re.compile(re.escape(name).replace(r"\*", r"[^.]+")), style) for name, style in plan.items()]
    found = {}
    for path, child in base.named_modules():
        style = next((style for pattern, style in styles if pattern.fullmatch(path)), None)
        if isinstance(child, nn.Linear) and style in (*COLUMNS, *ROWS):
            found[id(child)] = style
        elif style is not None and _are_experts(child):
            found[id(child)] = "experts"
    if mixers:
        found = dict(_by_structure(base)) | found
        for linear in (child for mixer in mixers for child in mixer.modules()):
            found.pop(id(linear), None)
    return found


def has_many_outputs(linear: nn.Linear) -> bool:
    """Whether it is worth to gather the outputs of a linear that every rank could compute whole."""
    return linear.out_features * _FEW >= linear.in_features


def _by_structure(base: nn.Module) -> Iterator[tuple[int, str]]:
    """Styles of the linears below `base`, by their ids."""
    for parent in base.modules():
        linears = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
        last = _last_of_attention(linears) if hasattr(parent, "layer_idx") else None
        last = "down_proj" if last is None and is_gated_mlp(parent) else last
        for name, linear in linears.items():
            if last is not None:
                yield id(linear), "rowwise" if name == last else "colwise"
            elif has_many_outputs(linear):
                yield id(linear), "colwise_gather_output"


def _last_of_attention(linears: dict[str, nn.Linear]) -> str | None:
    """The name of the product that reads the outputs of attention over q, k and v; None if they are not attention's."""
    last = next((name for name in LAST if name in linears), None)
    if last is None or not linears.keys() >= {*QKV}:
        return None
    return last if linears[last].in_features == linears["q_proj"].out_features else None


def _are_experts(child: nn.Module) -> bool:
    dims: dict[str, Any] = {name: parameter.dim() for name, parameter in child.named_parameters(recurse=False)}
    return dims in (EXPERT_MATRICES, EXPERT_MATRICES | EXPERT_BIASES)
