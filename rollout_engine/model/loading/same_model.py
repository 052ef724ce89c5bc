"""Whether the files next to new weights describe the model that is served: an update brings weights and nothing else.

A checkpoint of the same shapes may have another rotary base, or another epsilon: its weights under this engine's
configuration would be a model that was never trained.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from sync.errors import ManifestMismatch
from sync.manifest import counted

_WITHOUT_EFFECT = frozenset(
    """
    auto_map bos_token_id dtype eos_token_id initializer_range max_position_embeddings max_window_layers pad_token_id
    pretraining_tp quantization_config tie_word_embeddings use_cache use_sliding_window vocab_size
    hidden_size intermediate_size moe_intermediate_size num_hidden_layers
    """.split()
)
"""Fields that change no log-prob of a model whose weights have the engine's names and shapes. `use_sliding_window`
and `max_window_layers` are counted in `layer_types` and `sliding_window`; ties are checked with the weights."""
_OF_TRAINING = re.compile(r"drop|aux_loss|_coef$|^output_|init")
_ALWAYS = ("model_type", "rope_parameters", "hidden_act", "layer_types", "sliding_window")
"""Compared whether the files name them or not: their defaults are part of a format."""


def check_same_model(
    where: object, found: PretrainedConfig, live: PretrainedConfig, named: Iterable[str] | None = None
) -> None:
    """Raise `ManifestMismatch` if a field that changes log-probs differs.

    Args:
        where: the file that `found` was read from, for the error.
        named: the fields that the file has; None: all of the configuration.
    """
    ours, theirs = live.to_dict(), found.to_dict()
    known = {field.name for field in dataclasses.fields(found)}  # other names are of the program that wrote the file
    names = set(_ALWAYS) | (known if named is None else known.intersection(named))
    names -= _WITHOUT_EFFECT | PretrainedConfig().to_dict().keys() - {"model_type"}
    if _scales_by_length(theirs) or _scales_by_length(ours):
        names.add("max_position_embeddings")
    differing = [
        name
        for name in sorted(names & ours.keys() & theirs.keys())
        if not (name.startswith("_") or _OF_TRAINING.search(name) or _is_same(ours[name], theirs[name]))
    ]
    if differing:
        what = counted(differing, "field differs", "fields differ")
        shown = "; ".join(f"{name}={theirs[name]!r:.120}, here {ours[name]!r:.120}" for name in differing[:3])
        raise ManifestMismatch(
            f"{where} describes another model than the one that is served: {what} ({shown}). An update brings weights "
            "alone: load that checkpoint in an engine of its own."
        )


def _scales_by_length(fields: dict[str, Any]) -> bool:
    """Whether rotary frequencies may depend on the number of positions."""
    rope = fields.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    kinds = [rope.get("rope_type"), *(each.get("rope_type") for each in rope.values() if isinstance(each, dict))]
    return any(kind not in (None, "default", "llama3") for kind in kinds)


def _is_same(one: Any, other: Any) -> bool:
    """Whether values of JSON are equal, numbers as float32 holds them."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = {name for each in (one, other) for name, value in each.items() if value is not None}
        return all(_is_same(one.get(name), other.get(name)) for name in names)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return one == other or _rounds_alike(one, other)
    return bool(one == other)


def _rounds_alike(one: Any, other: Any) -> bool:
    try:
        with np.errstate(over="ignore"):
            return bool(np.float32(one) == np.float32(other))
    except (TypeError, ValueError, OverflowError):  # no numbers, or integers that no float holds
        return False
