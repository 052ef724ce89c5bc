"""Tensors of a checkpoint's vision tower under the names of its module, if the file has them in another way.

    file      vision_tower.encoder.blocks.0.norm0.weight            vision_tower.encoder.blocks.0.wqkv.weight
    module    model.vision_tower.layers.0.norm1.weight              model.vision_tower.layers.0.attn.{q,k,v}_proj.weight

Names are found as transformers finds them, all of a tower together: one may depend on whether the file has another.
A tensor may have the rows of several weights, in some order.
"""

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.composites import PICTURES, build_whole, remove_text
from sync.checkpoint_names import CheckpointNames
from sync.quantised.reader import CheckpointTensor
from sync.quantised.tensors import DequantisedTensor, Recipe
from sync.source import SourcePair
from sync.stored_tensor import StoredTensor


def with_tower_names(
    entries: list[CheckpointTensor], table: WeightTable, names: CheckpointNames, tower: PreTrainedModel | None
) -> list[CheckpointTensor]:
    """`entries`, in which those of the tower have names of its module, as transformers reads them.

    `tower`: a composite's parts other than its text model; None: nothing is changed. An entry that is not the tower's
    stays as it is.
    """
    if tower is None:
        return entries
    text: list[CheckpointTensor] = []
    others: list[CheckpointTensor] = []
    for entry in entries:
        own = names.own(entry.name, table.views)
        (text if own in table.views and not own.startswith(f"{PICTURES}.") else others).append(entry)
    return [*text, *_rename_all(others, tower)]


def with_module_names(pairs: list[SourcePair], config: PretrainedConfig) -> list[SourcePair]:
    """Pairs of a directory, in which tensors of several weights of a tower are divided, for an update.

    `config`: of the directory. Raises `Refusal` if transformers cannot build its composite.
    """
    if not _divides(get_checkpoint_conversion_mapping(config.model_type) or ()):
        return pairs
    tower = build_whole(config)
    remove_text(tower)
    stored = [each for _, each in pairs if isinstance(each, StoredTensor | DequantisedTensor)]
    renamed = [(each.name, each) for each in _rename_all(stored, tower)]
    return [*(pair for pair in pairs if not isinstance(pair[1], StoredTensor | DequantisedTensor)), *renamed]


def _divides(conversions: Iterable[object]) -> bool:
    """Whether a tensor of a file may be several weights."""
    return any(isinstance(each, WeightConverter) and len(each.target_patterns) > 1 for each in conversions)


def _rename_all(entries: list[CheckpointTensor], tower: PreTrainedModel) -> Iterator[CheckpointTensor]:
    conversions, weights, divided = get_model_conversion_mapping(tower), tower.state_dict(), divided_rows(tower)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    for entry in sorted(entries, key=lambda each: dot_natural_key(each.name)):  # a renaming may depend on one before
        name, converter = rename_source_key(entry.name, renamings, converters, tower.base_model_prefix, weights)
        parts = divided.get(entry.name, {})
        if isinstance(entry, StoredTensor) and parts and entry.shape[0] == sum(map(len, parts.values())):
            yield from _split(entry, parts)
        elif converter is None and name in weights:
            renamed = copy.copy(entry)
            renamed.name = name
            yield renamed
        else:
            yield entry


def divided_rows(tower: PreTrainedModel) -> dict[str, dict[str, Tensor]]:
    """By the name of a tensor in a file whose rows are those of several weights, the rows of each, int64, by its name.

    Transformers writes numbers of rows in the place of weights.
    """
    if not _divides(get_model_conversion_mapping(tower)):
        return {}
    numbers, ranges, first = {}, {}, 0
    for name, weight in tower.state_dict().items():
        if weight.dim():
            numbers[name] = torch.arange(first, first + len(weight)).view(-1, *[1] * (weight.dim() - 1))
            ranges[name] = first, first + len(weight)
            first += len(weight)
    found: dict[str, dict[str, Tensor]] = {}
    for stored, rows in revert_weight_conversion(tower, numbers).items():
        order = rows.flatten().argsort()
        numbered = rows.flatten()[order]
        parts = {
            name: order[(numbered >= low) & (numbered < high)]
            for name, (low, high) in ranges.items()
            if bool(((numbered >= low) & (numbered < high)).any())
        }
        if len(parts) > 1:
            found[stored] = parts
    return found


def _split(entry: StoredTensor, parts: dict[str, Tensor]) -> Iterator[DequantisedTensor]:
    for name, rows in parts.items():
        shape = (len(rows), *entry.shape[1:])
        yield DequantisedTensor(name, Recipe(shape, [entry], lambda stored, rows=rows: stored[rows].float()))
