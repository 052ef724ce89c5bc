"""The roles of the parts of a decoder, by the names that transformers' modelling files give them."""

from collections.abc import Iterable

_ROLES = {
    # of a base model
    **dict.fromkeys(("embed_tokens", "embeddings"), "embedding"),
    "layers": "layers",
    **dict.fromkeys(("norm", "embedding_norm", "final_layernorm", "norm_f"), "norm"),
    **dict.fromkeys(("rotary_emb", "pos_emb"), "rotary"),
    # of a layer
    **dict.fromkeys(("input_layernorm", "operator_norm"), "attention_norm"),
    "self_attn": "attention",
    **dict.fromkeys(("linear_attn", "conv", "mamba"), "mixer"),
    **dict.fromkeys(("post_attention_layernorm", "ffn_norm", "pre_ff_layernorm"), "mlp_norm"),
    **dict.fromkeys(("mlp", "feed_forward"), "mlp"),
    "block_sparse_moe": "mixture",
    "shared_mlp": "shared_mlp",
    "post_feedforward_layernorm": "norm_behind",  # and "mlp_norm" is behind attention
    # of a layer that is one of the two halves of others (Nemotron-H), and has a norm alone before it
    "mixer": "half",
    # of attention
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    **dict.fromkeys(("q_norm", "q_layernorm"), "q_norm"),
    **dict.fromkeys(("k_norm", "k_layernorm"), "k_norm"),
    **dict.fromkeys(("o_proj", "out_proj"), "out"),
}


def names_by_role(names: Iterable[str]) -> dict[str, str] | None:
    """The names of a module's parts by their roles; None if one is unknown, or two have one role."""
    found: dict[str, str] = {}
    for name in names:
        role = _ROLES.get(name)
        if role is None or role in found:
            return None
        found[role] = name
    return found
