"""Makes the configuration of a model, as transformers names it, from the metadata of a GGUF file.

Architectures have a row if llama.cpp's names and conversions of them are known here. A value of the metadata that
belongs to the architecture and has no row is refused: it may change the values that the model computes.
"""

import math
from typing import Any

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.header import GgufHeader

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""llama.cpp's architecture -> model_type and class of transformers. llama.cpp calls Mistral "llama" too."""
_COUNTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_COUNTS_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Sizes of a head's keys, values and rotated part; one of them, or all alike, is the size of a head."""
_OTHERS = ("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size")
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, by which llama.cpp stores the scaling of Llama 3."""
_LLAMA3: dict[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_INSTEAD = "Serve the checkpoint that it was made from"


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of config.json. Raises `ConfigError` for metadata that is missing, contradictory or not known."""
    name = header.need("general.architecture", str)
    if name not in _CLASSES:
        raise ConfigError(
            f"{header.path}: GGUF files of the architecture {name!r:.60} are not served: expected one of "
            f"{', '.join(_CLASSES)}. {_INSTEAD}."
        )
    model_type, class_name = _CLASSES[name]
    counts = _COUNTS | (_COUNTS_OF_EXPERTS if model_type == "qwen3_moe" else {})
    _refuse_unknown(header, name, {*counts, *_HEADS, *_OTHERS})
    config: dict[str, Any] = {theirs: header.need(f"{name}.{key}", int) for key, theirs in counts.items()}
    if model_type == "qwen3_moe":  # llama.cpp divides by the sum of the chosen weights, always
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    num_heads = config["num_attention_heads"]
    config["num_key_value_heads"] = header.get(f"{name}.attention.head_count_kv", int) or num_heads
    config["head_dim"] = head_dim = _head_dim(header, name, config["hidden_size"], num_heads)
    _check_tensors(header, config)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": header.get(f"{name}.rope.freq_base", float) or 10000.0,
    }
    if ROPE_FACTORS in header.tensors:
        rope |= _llama3_scaling(header, rope["rope_theta"], head_dim)
    return config | {
        "architectures": [class_name],
        "model_type": model_type,
        "rms_norm_eps": header.need(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": rope,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        **token_ids(header),
    }


def token_ids(header: GgufHeader) -> dict[str, Any]:
    """Ids of special tokens as config.json and generation_config.json have them; generation ends at each eos."""
    ends = [header.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
    return {
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
        "pad_token_id": header.get("tokenizer.ggml.padding_token_id", int),
    }


def _refuse_unknown(header: GgufHeader, name: str, known: set[str]) -> None:
    if (scaling := header.get(f"{name}.rope.scaling.type", str)) == "none":
        known = known | {"rope.scaling.type"}
    elif scaling is not None:
        raise ConfigError(f"{header.path}: {name}.rope.scaling.type='{scaling}' is not served. {_INSTEAD}.")
    if header.get("split.count", int) not in (None, 0, 1):
        raise ConfigError(f"{header.path} is one of several files: merge them with llama.cpp's llama-gguf-split.")
    keys = [key for key in header.metadata if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known]
    if keys:
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        raise ConfigError(
            f"{header.path}: {keys[0]}={header.metadata[keys[0]]!r:.40}{more} may change the logits, and "
            f"is not read. {_INSTEAD}."
        )


def _head_dim(header: GgufHeader, name: str, hidden_size: int, num_heads: int) -> int:
    sizes = {size for key in _HEADS if (size := header.get(f"{name}.{key}", int)) is not None}
    if len(sizes) > 1:
        raise ConfigError(f"{header.path}: {', '.join(_HEADS)} of {name} differ, which is not served. {_INSTEAD}.")
    return sizes.pop() if sizes else hidden_size // max(num_heads, 1)


def _check_tensors(header: GgufHeader, config: dict[str, Any]) -> None:
    """Raise `ConfigError` unless the sizes, of which a model is built, are those of the tensors in the file."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = header.tensors["token_embd.weight"].shape[0:1] if "token_embd.weight" in header.tensors else (0,)
    expected: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (*rows, hidden),
        "blk.0.attn_q.weight": (num_heads * head_dim, hidden),
        "blk.0.attn_k.weight": (num_kv_heads * head_dim, hidden),
    }
    num_experts, num_chosen = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
    if "num_experts" in config:
        expected["blk.0.ffn_down_exps.weight"] = num_experts, hidden, config["moe_intermediate_size"]
    else:
        expected["blk.0.ffn_down.weight"] = hidden, config["intermediate_size"]
    for name, shape in expected.items():
        if name not in header.tensors or header.tensors[name].shape != shape or 0 in shape:
            found = list(header.tensors[name].shape) if name in header.tensors else "none"
            raise ConfigError(f"{header.path}: by its metadata {name} has shape {list(shape)}; found {found}.")
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(layers) != config["num_hidden_layers"] or num_heads % num_kv_heads or not 1 <= num_chosen <= num_experts:
        raise ConfigError(
            f"{header.path}: numbers of its metadata contradict each other or its {len(layers)} layers: "
            f"{config['num_hidden_layers']} layers, {num_heads} heads over {num_kv_heads} of keys, {num_chosen} of "
            f"{num_experts} experts."
        )


def _llama3_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of Llama 3's scaling that give the stored factors. Raises `ConfigError` if there are none.

    Its formula: https://github.com/meta-llama/llama-models/blob/main/models/llama3/reference_impl/model.py
    """
    stored = header.floats(ROPE_FACTORS)
    factor, computed = max(stored, default=1.0), []
    if 1 <= factor < math.inf and 1 <= theta < math.inf:
        wavelengths = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
        computed = [_llama3_factor(wavelength, factor) for wavelength in wavelengths]
    if len(stored) != len(computed) or not all(abs(a - b) <= 1e-4 * b for a, b in zip(stored, computed, strict=True)):
        raise ConfigError(
            f"{header.path}: {ROPE_FACTORS} is not that of a Llama 3, and no other is served. {_INSTEAD}."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factor(wavelength: float, factor: float) -> float:
    low, high, original = _LLAMA3.values()
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
