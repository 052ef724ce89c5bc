"""Writes GGUF files as llama.cpp's converter does: of tiny models, or of any metadata and tensors."""

import struct
from pathlib import Path

import numpy as np

F32 = 0
_NUMBERS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
"""Type and format of a value, by its Python type."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


def header_of(metadata, tensors):
    """The bytes of a header; `tensors`: name -> (shape, type, number of bytes)."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    for name, (shape, kind, num_bytes) in tensors.items():
        out += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        offset += -(-num_bytes // 32) * 32
    return out + bytes(-len(out) % 32)


def write_gguf(path, metadata, tensors):
    """Write a file; `tensors`: name -> float32 array, or (type, shape, bytes) of a quantised one."""
    table, data = {}, b""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = F32, tensor.shape, np.ascontiguousarray(tensor, np.float32).tobytes()
        kind, shape, content = tensor
        table[name] = shape, kind, len(content)
        data += content + bytes(-len(content) % 32)
    path = Path(path)
    path.write_bytes(header_of(metadata, table) + data)
    return path


def quantised(tensors, kind):
    """The tensors with their matrices in a format of the package gguf, such as "Q8_0"."""
    import gguf.quants

    form = gguf.GGMLQuantizationType[kind]
    return {
        name: (form, values.shape, gguf.quants.quantize(values, form).tobytes()) if values.ndim > 1 else values
        for name, values in tensors.items()
    }


def metadata_of(config, tokens=None, **tokenizer):
    """What llama.cpp says of a model; `tokenizer`: fields of `tokenizer.ggml`."""
    name = ARCHITECTURES[config.model_type]
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if name == "qwen3moe":
        found["expert_count"], found["expert_used_count"] = config.num_experts, config.num_experts_per_tok
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    texts = tokenizer_values(tokens or [f"t{i}" for i in range(config.vocab_size)], **tokenizer)
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in found.items()}, **texts}


def tokenizer_values(tokens, merges=(), types=None, **fields):
    """The metadata of a tokenizer, by default GPT-2's kind with ids 1 and 2 at begin and end."""
    usual = dict(model="gpt2", pre="gpt-2", bos_token_id=1, eos_token_id=2)
    values = dict(tokens=list(tokens), merges=list(merges), token_type=types or [3] * 3 + [1] * (len(tokens) - 3))
    return {f"tokenizer.ggml.{key}": value for key, value in (usual | values | fields).items()}


def tensors_of(model):
    """The weights of a model, renamed and reordered as llama.cpp stores them."""
    config, found = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.detach().float().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            found[_renamed(name.replace("gate_up", "gate") + ".weight")] = gate
            found[_renamed(name.replace("gate_up", "up") + ".weight")] = up
        else:
            found[_renamed(name if name.endswith(("weight", "bias")) else name + ".weight")] = values
    return found


def _renamed(name):
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        layer = f"blk.{number}."
    return f"{layer}{NAMES[stem]}.{kind}"


def _string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        if value and not isinstance(value[0], str):
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    kind, form = _NUMBERS[type(value)]
    return struct.pack(f"<I{form}", kind, value)
