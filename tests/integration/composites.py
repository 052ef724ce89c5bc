"""Tiny random composites: their configurations by kind, and the text model of one alone."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from rollout_engine.testing import byte_tokenizer
from rollout_engine.testing.tiny_pictures import name_as_published

_TEXT = dict(
    vocab_size=259,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=88,
    num_hidden_layers=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_WINDOW = dict(sliding_window=19, layer_types=["sliding_attention", "full_attention"])
_SECTIONS = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]))
_HALF = _SECTIONS["rope_parameters"] | dict(partial_rotary_factor=0.5, mrope_section=[1, 1, 2])
_OF_HEADS = dict(_TEXT, num_attention_heads=3, num_key_value_heads=1, **_SECTIONS)
_EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, n_group=1, topk_group=1)
_LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, head_dim=8)
_SCALED = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, original_max_position_embeddings=48)
_LINEAR = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
_EYES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
)
_DEEP_EYES = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=48, patch_size=8)


def _seen_by(kind, text, **others):
    return dict(text_config=_TEXT | dict(model_type=text), vision_config=dict(_EYES, model_type=kind)) | others


COMPOSITES = {
    "gemma3": dict(text_config=_TEXT | _WINDOW, vision_config=_EYES),
    "gemma4": dict(
        text_config=_TEXT
        | _WINDOW
        | dict(num_kv_shared_layers=0, vocab_size_per_layer_input=259, use_bidirectional_attention="vision"),
        vision_config=None,
        audio_config=None,
    ),
    "mistral3": _seen_by("pixtral", "mistral", tie_word_embeddings=False),
    "mistral3 of ministral3": dict(
        text_config=_TEXT | dict(model_type="ministral3", rope_parameters=_SCALED | dict(llama_4_scaling_beta=0.1)),
        vision_config=dict(_EYES, model_type="pixtral", head_dim=16),
        tie_word_embeddings=False,
    ),
    "qwen2_vl": dict(
        text_config=_OF_HEADS, vision_config=dict(depth=1, embed_dim=32, hidden_size=48, num_heads=2, patch_size=8)
    ),
    "qwen2_5_vl": dict(text_config=_OF_HEADS, vision_config=_DEEP_EYES),
    "qwen3_vl": dict(text_config=_TEXT | _SECTIONS, vision_config=dict(_DEEP_EYES, deepstack_visual_indexes=[0])),
    "glm4v": dict(text_config=_OF_HEADS, vision_config=_DEEP_EYES),
    "glm4v_moe": dict(
        text_config=_OF_HEADS | _EXPERTS | dict(first_k_dense_replace=1, rope_parameters=_HALF),
        vision_config=_DEEP_EYES,
    ),
    "internvl": dict(
        text_config=_TEXT | dict(model_type="qwen2"), vision_config=_EYES | dict(image_size=[32, 32], patch_size=[8, 8])
    ),
    "idefics3": _seen_by("idefics3_vision", "llama"),
    "smolvlm": _seen_by("smolvlm_vision", "llama"),
    "aya_vision": _seen_by("siglip_vision_model", "cohere2"),
    "llava": _seen_by("clip_vision_model", "llama"),
    "llava_next": _seen_by("clip_vision_model", "mistral"),
    "llava_onevision": _seen_by("siglip_vision_model", "qwen2"),
    "paligemma": _seen_by("siglip_vision_model", "gemma"),
    "llama4": dict(text_config=_TEXT),
    "qwen3_5": dict(text_config=_TEXT | _LINEAR, vision_config=_DEEP_EYES),
    "qwen3_5_moe": dict(
        text_config=_TEXT
        | _LINEAR
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=56),
        vision_config=_DEEP_EYES,
    ),
    "qwen3_vl_moe": dict(
        text_config=_TEXT | _SECTIONS | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40),
        vision_config=dict(_DEEP_EYES, deepstack_visual_indexes=[0]),
    ),
    "kimi_k25": dict(
        text_config=_TEXT
        | _EXPERTS
        | _LATENT
        | dict(model_type="deepseek_v3", num_attention_heads=3, num_key_value_heads=3, first_k_dense_replace=1),
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2),
        projection_hidden_size=32,
        tie_word_embeddings=False,
    ),
}
"""Configurations by `model_type`."""


def composite(kind="gemma3", seed=0, **overrides):
    """A random composite, whose logits are far from uniform."""
    config = CONFIG_MAPPING[kind.split()[0]](**COMPOSITES[kind] | overrides)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def text_of(model):
    """Its text model alone, as transformers' causal LM, with weights of its own."""
    text = AutoModelForCausalLM.from_config(model.config.get_text_config(), dtype=torch.float32).eval()
    text.model.load_state_dict(model.get_decoder().state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    return text


def save(model, path):
    model.save_pretrained(path)
    if model.config.model_type == "kimi_k25":
        name_as_published(path / "model.safetensors")
    byte_tokenizer().save_pretrained(path)
    return path


def save_as(model, path):
    """Save a module, and return it as `from_pretrained` loads it."""
    save(model, path)
    return AutoModelForMultimodalLM.from_pretrained(path, dtype=model.dtype).eval()
