"""The architectures that every release is tested with, by `model_type`, their variants, and sizes of tiny models."""

from typing import Any

_HEADS = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=88)
_THREE_HEADS = dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=3, head_dim=16, intermediate_size=88)
_BOTH_KINDS: dict[str, Any] = dict(sliding_window=19, layer_types=["sliding_attention", "full_attention"])
_EXPERTS = dict(num_experts=5, num_local_experts=5, num_experts_per_tok=2, moe_intermediate_size=40)
_BIASED = dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 8) | dict(
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=56,
    n_shared_experts=1,
    num_shared_experts=1,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
    num_dense_layers=1,
)
"""Experts of the architectures that choose with a bias, by groups, or next to a shared expert; each reads some."""
_LATENT = dict(
    hidden_size=48,
    num_attention_heads=3,
    num_key_value_heads=3,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
)
_YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, original_max_position_embeddings=512)

_SCALED_QUERIES = _YARN | dict(original_max_position_embeddings=48, llama_4_scaling_beta=0.1)

SIZES: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen2": _HEADS,
    "qwen3": _HEADS,
    "mistral": _HEADS | dict(sliding_window=19),
    "phi3": _THREE_HEADS | dict(num_key_value_heads=1),
    "gemma2": _HEADS | dict(sliding_window=19, query_pre_attn_scalar=24, attn_logit_softcapping=20.0),
    "gemma3_text": _HEADS | _BOTH_KINDS,
    "gemma4_text": _HEADS
    | dict(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2, *["full_attention"] * 2],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        sliding_window=19,
        global_head_dim=24,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=259,
        final_logit_softcapping=30.0,
    ),
    "olmo2": _THREE_HEADS,
    "gpt_neox": _THREE_HEADS,
    "gpt2": dict(n_embd=48, n_head=3, n_layer=2, n_positions=512),
    "qwen3_moe": _HEADS | _EXPERTS,
    "mixtral": _HEADS | _EXPERTS,
    "gpt_oss": _HEADS | _EXPERTS | dict(sliding_window=19, rope_parameters=_YARN),
    "qwen2_moe": _HEADS | _EXPERTS | dict(shared_expert_intermediate_size=56),
    "olmoe": _THREE_HEADS | _EXPERTS,
    "granite": _HEADS,
    "granitemoe": _HEADS | _EXPERTS,
    "cohere": _HEADS,
    "cohere2": _HEADS | _BOTH_KINDS,
    "starcoder2": _HEADS | dict(sliding_window=19),
    "stablelm": _THREE_HEADS,
    "phi": _THREE_HEADS,
    "opt": dict(hidden_size=48, ffn_dim=88, word_embed_proj_dim=48, num_attention_heads=3),
    "smollm3": _HEADS,
    "seed_oss": _HEADS,
    "apertus": _HEADS,
    "olmo": _THREE_HEADS,
    "olmo3": _THREE_HEADS | _BOTH_KINDS,
    "glm": _HEADS,
    "glm4": _HEADS,
    "nemotron": _HEADS,
    "ministral3": _HEADS | dict(rope_parameters=_SCALED_QUERIES),
    "phimoe": _HEADS | _EXPERTS,
    "laguna": _HEADS | _BIASED | dict(sliding_window=19),
    "minimax_m2": _HEADS | _BIASED,
    "hy_v3": _HEADS | _BIASED,
    "dots1": _HEADS | _BIASED,
    "solar_open": _HEADS | _BIASED,
    "glm4_moe": _HEADS | _BIASED,
    "exaone_moe": _HEADS | _BIASED | _BOTH_KINDS,
    "mimo_v2_flash": _HEADS | _BIASED | dict(num_key_value_heads=1, v_head_dim=12, sliding_window=19),
    "afmoe": _HEADS | _BIASED | _BOTH_KINDS,
    "ernie4_5_moe": _HEADS | _BIASED,
    "glm4_moe_lite": _LATENT | _BIASED,
    "deepseek_v2": _LATENT | _BIASED | dict(topk_method="group_limited_greedy"),
    "deepseek_v3": dict(
        **_LATENT,
        head_dim=8,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        first_k_dense_replace=1,
    ),
    "longcat_flash": _LATENT
    | dict(
        head_dim=8,
        num_hidden_layers=4,
        ffn_hidden_size=88,
        expert_ffn_hidden_size=40,
        n_routed_experts=6,
        zero_expert_num=2,
        moe_topk=3,
        routed_scaling_factor=1.5,
    ),
}
"""Arguments for `tiny_config`: odd numbers of heads, few experts, windows and lengths shorter than a prompt."""

_LINEAR = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    shared_expert_intermediate_size=56,
)
_MAMBA = _THREE_HEADS | dict(
    num_key_value_heads=1,
    num_hidden_layers=3,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=16,
)
_CONVOLVED = _THREE_HEADS | dict(
    num_key_value_heads=1, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3
)

HYBRID_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _HEADS | _LINEAR,
    "qwen3_next": _HEADS | _LINEAR | _EXPERTS | dict(mlp_only_layers=[0]),
    "qwen3_5_moe_text": _HEADS | _LINEAR | _EXPERTS,
    "olmo_hybrid": _HEADS | _LINEAR | dict(linear_allow_neg_eigval=True),
    "kimi_linear": _LATENT
    | dict(
        q_lora_rank=None,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_num_heads=4,
        linear_head_dim=12,
        num_local_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "lfm2": _CONVOLVED | dict(block_auto_adjust_ff_dim=False, conv_bias=True),
    "lfm2_moe": _CONVOLVED | dict(num_dense_layers=1, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40),
    "bamba": _MAMBA | dict(attn_layer_indices=[1]),
    "granitemoehybrid": _MAMBA
    | dict(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=56,
        residual_multiplier=0.7,
        logits_scaling=1.5,
        position_embedding_type="rope",
    ),
    "nemotron_h": _HEADS
    | dict(
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        ssm_state_size=8,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=56,
    ),
    "falcon_h1": _MAMBA
    | dict(
        mamba_d_ssm=96,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        lm_head_multiplier=0.8,
        embedding_multiplier=1.3,
        mlp_multipliers=[0.9, 1.1],
        ssm_multipliers=[0.8, 0.9, 1.1, 1.2, 0.7],
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.9,
        attention_out_multiplier=1.2,
    ),
}
"""The same for architectures with layers that keep a state in place of keys and values."""

_INDEXED = SIZES["deepseek_v3"] | dict(index_topk=24, index_head_dim=16, index_n_heads=12)
INDEXED_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEXED,
    "axk2": _INDEXED,
    "glm_moe_dsa": _INDEXED | dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
}
"""The same for architectures whose queries attend to positions that an indexer chooses."""
ALL_SIZES = SIZES | HYBRID_SIZES | INDEXED_SIZES

_GEMMA4 = SIZES["gemma4_text"] | dict(num_kv_shared_layers=0, use_double_wide_mlp=False)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3_one_group": ("deepseek_v3", SIZES["deepseek_v3"] | dict(n_group=1)),
    "deepseek_v3_eight_groups": (
        "deepseek_v3",
        SIZES["deepseek_v3"] | dict(n_routed_experts=16, n_group=8, topk_group=3, num_experts_per_tok=4),
    ),
    "gemma4_text_own_kv": ("gemma4_text", _GEMMA4),
    "gemma4_text_experts": (
        "gemma4_text",
        _GEMMA4
        | dict(
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=40,
            hidden_size_per_layer_input=0,
        ),
    ),
}
"""Further models of these types, built otherwise: name -> (`model_type`, arguments for `tiny_config`)."""


def sizes_of(name: str) -> tuple[str, dict[str, Any]]:
    """(`model_type`, arguments for `tiny_config`) of an architecture or a variant."""
    return VARIANTS[name] if name in VARIANTS else (name, ALL_SIZES[name])
