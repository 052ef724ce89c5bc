"""Reads checkpoints whose own code is another type's layers as that type. No code from a checkpoint is ever run.

    config.json {"model_type": "kimi_k2", ...} ──> the configuration of deepseek_v3

A row of `ALIASES` names the published code that was compared, and the values that its configuration must have. A field
that neither the other type nor the row has is refused, since it may change the results of that code. Weights are
checked at load: missing ones and unknown ones are refused, as for every checkpoint.
"""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PretrainedConfig

from rollout_engine.base.errors import ConfigError


class Alias(NamedTuple):
    """A type of checkpoint with the layers of another type."""

    model_type: str
    """The other type, which transformers has built in."""
    required: dict[str, Any]
    """Values of fields that this type's code reads, and the other type does not: it computes as if they were these."""
    without_effect: frozenset[str] = frozenset()
    """Fields that change no log-prob: of training losses, and of how code was run."""


ALIASES = {
    # Transformers itself reads a text_config of this type as deepseek_v3 (models/kimi_k25/configuration_kimi_k25.py);
    # the published modeling_deepseek.py is that of DeepSeek-V3.
    "kimi_k2": Alias(
        "deepseek_v3",
        required=dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, rope_interleave=True),
        without_effect=frozenset({"aux_loss_alpha", "ep_size", "seq_aux"}),
    ),
    # XiaomiMiMo/MiMo-7B-RL, modeling_mimo.py: MiMoForCausalLM is Qwen2ForCausalLM; its model is Qwen2Model with
    # mtp_layers in addition, which only draft. Qwen2's attention has biases for any value of the field.
    "mimo": Alias(
        "qwen2",
        required=dict(attention_bias=True, use_mrope=False),
        without_effect=frozenset({"num_nextn_predict_layers"}),
    ),
}
"""Rows by `model_type`, as config.json has it."""

_OF_ALL_TYPES = frozenset(
    """
    _name_or_path architectures auto_map dtype head_dim model_type quantization_config rope_scaling rope_theta
    torch_dtype transformers_version
    """.split()
)
"""Fields that configurations of every type accept, though not all of them have them by default."""


def config_of_alias(raw: dict[str, Any], path: Path) -> PretrainedConfig | None:
    """The configuration of the other type, for the content of a config.json of a type in `ALIASES`; None for others.

    A type that transformers has built in is not read as another one. `path`: of the file, for errors. Raises
    `ConfigError` if a field is not known, or has another value than required.
    """
    alias = ALIASES.get(str(raw.get("model_type")))
    if alias is None or raw["model_type"] in CONFIG_MAPPING:
        return None
    about = f"{path}: a checkpoint of model_type '{raw['model_type']}' is read as '{alias.model_type}'"
    wrong = [name for name, value in alias.required.items() if raw.get(name, value) != value]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{about}, which computes as if {name} were {alias.required[name]!r}, and it is {raw[name]!r}."
        )
    config_class = CONFIG_MAPPING[alias.model_type]
    known = {*vars(config_class()), *config_class.attribute_map, *alias.required, *alias.without_effect, *_OF_ALL_TYPES}
    if strangers := sorted(raw.keys() - known):
        raise ConfigError(
            f"{about}, whose configuration has no {', '.join(strangers)}: its own code may compute something else with "
            "that, and such code is never run here."
        )
    fields = {name: value for name, value in raw.items() if name not in ("auto_map", "model_type")}
    found: PretrainedConfig = config_class.from_dict(fields)
    return found
