"""Tiny random models of every type: those with sizes of their own, composites, and all others by a generic recipe."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout_engine.testing import byte_tokenizer, tiny_model
from rollout_engine.testing.architectures import ALL_SIZES
from rollout_engine.testing.models import tiny_config
from tests.integration.composites import COMPOSITES, composite, save
from tests.models.recipe import tiny_models


class Tiny(NamedTuple):
    """A configuration of a type, and a function that makes its random model."""

    config: PretrainedConfig
    make: Callable[[], PreTrainedModel]

    def save_config(self, directory: Path) -> None:
        """Write what a load with `load_format="dummy"` reads."""
        self.config.save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)

    def save(self, directory: Path) -> None:
        """Write the whole checkpoint."""
        save(self.make(), directory)


def all_names() -> list[str]:
    """Every composite that is tested, and every other causal LM of transformers by its `model_type`."""
    composites = {name.split()[0] for name in COMPOSITES}
    return sorted({*COMPOSITES, *((MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | ALL_SIZES.keys()) - composites)})


def kind_of(name: str) -> str:
    """As in results.json."""
    return "composite" if name in COMPOSITES else "type"


def sizes_of(name: str) -> str:
    """As in results.json."""
    return "own" if name in COMPOSITES or name in ALL_SIZES else "generic"


def tiny_of(name: str) -> Iterator[Tiny]:
    """Models to try, the likeliest first: one, but for types without sizes of their own."""
    if name in COMPOSITES:
        yield Tiny(CONFIG_MAPPING[name.split()[0]](**COMPOSITES[name]), lambda: composite(name))
    elif name in ALL_SIZES:
        yield Tiny(tiny_config(name, **ALL_SIZES[name]), lambda: tiny_model(name, **ALL_SIZES[name]))
    else:
        for model in tiny_models(name):
            yield Tiny(model.config, lambda model=model: model)


def tiny_for_ranks(name: str) -> Tiny | None:
    """The model of a type whose heads are divided among two ranks; None if its usual ones are."""
    fields = ALL_SIZES.get(name, {})
    heads, kv_heads = fields.get("num_attention_heads", 0), fields.get("num_key_value_heads")
    if heads % 2 == 0:
        return None
    fields = fields | dict(hidden_size=64, num_attention_heads=4)
    if "mamba_n_heads" in fields:  # as many channels as the hidden size has, times mamba_expand
        fields |= dict(mamba_n_heads=2 * 64 // fields["mamba_d_head"], mamba_d_ssm=2 * 64)
    fields |= {} if kv_heads is None else dict(num_key_value_heads=4 if kv_heads == heads else kv_heads)
    return Tiny(tiny_config(name, **fields), lambda: tiny_model(name, **fields))
