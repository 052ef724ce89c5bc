"""Text models of composites that transformers has no causal LM of, such as Qwen2.5-VL's, with an output head.

The gate compares them with the composite: that the head is one linear on the hidden states is tried, not assumed.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


def text_model_with_head(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """A class that adds an output head to the base model of `config`; None if transformers has a causal LM of it."""
    if type(config) in AutoModelForCausalLM._model_mapping or type(config) not in AutoModel._model_mapping:
        return None
    return _with_head(AutoModel._model_mapping[type(config)])


@cache
def _with_head(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A causal LM around `base`, which initialises weights as `base` does."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    parts = {"base_model_prefix": "model", "_tied_weights_keys": tied, "_base": base, "__module__": __name__}
    parent: Any = next(each for each in base.__mro__[1:] if issubclass(each, PreTrainedModel))
    return type(f"{base.__name__}WithHead", (_TextModelWithHead, parent), parts)


class _TextModelWithHead(PreTrainedModel):
    """lm_head(model(...)), as causal LMs of transformers are."""

    _base: type[PreTrainedModel]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = self._base(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, *args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> CausalLMOutputWithPast:
        """Logits [B, number of rows, V] behind the last `logits_to_keep` tokens, or those it lists; 0: behind all."""
        states = self.model(*args, **kwargs).last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(states[:, rows]))


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of the embedding, inside any wrapper of the causal LM; None if it has no plain embedding."""
    owner: Any = next((child for child in model.modules() if hasattr(child, "get_input_embeddings")), None)
    return None if owner is None else getattr(owner.get_input_embeddings(), "num_embeddings", None)
