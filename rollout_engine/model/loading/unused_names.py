"""The names that checkpoints of a model may have beside its own."""

from transformers import PreTrainedModel

from sync.checkpoint_names import CheckpointNames

_OF_OLD_RELEASES = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Stored by old versions of transformers; computed now."""


def checkpoint_names(module: PreTrainedModel) -> CheckpointNames:
    """The names that `from_pretrained` accepts for `module` and does not use, and the prefix that it adds."""
    unused = [*_OF_OLD_RELEASES, *(module._keys_to_ignore_on_load_unexpected or ())]
    num_layers, num_drafting = (
        getattr(module.config, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    if num_drafting:  # stored behind the model's own layers, as DeepSeek and GLM do
        numbers = "|".join(map(str, range(num_layers, num_layers + num_drafting)))
        unused.append(rf"(^|\.)layers\.({numbers})\.")
    return CheckpointNames(module.base_model_prefix, sorted(unused))
