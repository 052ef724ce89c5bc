"""Tiny random models and tokenizers; `tiny_checkpoint` writes a directory that `from_pretrained` reads."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_MODELS = {
    None: AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte tokenizer (ids 3 to 258, after `<pad>`=0, `<bos>`=1, `<eos>`=2), so that characters can span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: i for i, token in enumerate(specials + alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


TINY_SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
"""Fields of a decoder with 2 layers."""


def tiny_config(architecture: str = "qwen3", **overrides: Any) -> Any:
    """A Hugging Face config of `model_type=architecture`, with 2 layers and hidden size 64."""
    fields: dict[str, Any] = dict(vocab_size=259, **TINY_SIZES)
    return AutoConfig.for_model(architecture, **(fields | overrides))


def tiny_model(
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.2,
    head: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A random Hugging Face causal LM; `std` of the weights is large, so that logits are far from uniform.

    `head`: "sequence" or "token" for one that classifies; a reward model has head="sequence" and num_labels=1.
    """
    config = tiny_config(architecture, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _MODELS[head].from_config(config, dtype=dtype)
        with torch.no_grad():
            vectors = [(name, buffer) for name, buffer in model.named_buffers() if buffer.dim() == 1]
            for name, tensor in (*model.named_parameters(), *vectors):
                if tensor.dim() > 1:
                    tensor.normal_(0.0, std)
                elif name.endswith("bias"):
                    tensor.normal_(0.0, 0.1)
    model.eval()
    return model


def tiny_checkpoint(directory: str | Path, architecture: str = "qwen3", **kwargs: Any) -> Path:
    """Write a tiny model (arguments as for `tiny_model`) and its byte tokenizer to `directory`, and return that."""
    path = Path(directory)
    model = tiny_model(architecture, **kwargs)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))
    return path
