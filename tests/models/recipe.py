"""A generic recipe: tiny random models of every causal LM that transformers has."""

import copy
from itertools import cycle, islice

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine.testing.architectures import ALL_SIZES

_MOST_PARAMETERS = 8_000_000
_COMMON = dict(vocab_size=259, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_FIELDS = (
    _COMMON
    | dict(tie_word_embeddings=False)
    | dict.fromkeys(["hidden_size", "d_model", "n_embd", "word_embed_proj_dim"], 64)
    | dict.fromkeys(["n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"], 2)
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4)
    | dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff"], 96)
    | dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim"], 96)
    | dict.fromkeys(["max_position_embeddings", "n_positions"], 256)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 40)
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4)
    | dict(num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)
    | dict(num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=16, sliding_window=19)
    | dict.fromkeys(["head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"], 16)
    | dict.fromkeys(["mamba_d_state", "state_size"], 8)
)
_LEFT_WHERE_UNSET = {"sliding_window", "head_dim", "moe_intermediate_size", "q_lora_rank"}
_SERVED_KINDS = {
    "sliding_attention",
    "full_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "moe",
    "mlp",
    "dense",
    "sparse",
}


def recipes(model_type):
    """Fields for a config of this type, the likeliest first."""
    if model_type in ALL_SIZES:
        yield _COMMON | ALL_SIZES[model_type]
    try:
        default = AutoConfig.for_model(model_type)
    except Exception:  # it cannot be made without arguments
        return
    given = {}
    for name, value in _FIELDS.items():
        try:
            current = getattr(default, name)
        except Exception:  # it has none, or one for each layer
            continue
        if current is not None or name not in _LEFT_WHERE_UNSET:
            given[name] = value
    yield given
    if "num_key_value_heads" in given:
        yield given | {"num_key_value_heads": 4}
        yield {name: value for name, value in given.items() if name not in ("head_dim", "num_key_value_heads")}


def tiny_models(model_type):
    """Random models of this type, one for each recipe that transformers can build."""
    for fields in recipes(model_type):
        try:
            config = AutoConfig.for_model(model_type, **fields)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > _MOST_PARAMETERS:
                continue
            model = random_model(config)
        except Exception:  # whatever transformers does with a configuration that does not fit
            continue
        if (whole := _with_all_kinds(model_type, model)) is not None:
            yield whole


def _with_all_kinds(model_type, model):
    """A model like it with a layer of each kind that its type has.

    If transformers does not build that, the model itself; None if an engine would serve it, and not its type.
    """
    fields, config = layer_kinds(model_type), copy.deepcopy(model.config)
    present = {kind for field in fields for kind in getattr(config, field) or ()}
    missing = set().union(*fields.values()) - present
    if not missing:
        return model
    config.num_hidden_layers = max(map(len, fields.values()))
    for field, kinds in fields.items():
        in_order = sorted(kinds, key=lambda kind: (kind == "full_attention", kind))  # some types want that last
        setattr(config, field, list(islice(cycle(in_order), config.num_hidden_layers)))
    try:
        return random_model(config)
    except Exception:  # whatever transformers does with a configuration that does not fit
        return None if missing - _SERVED_KINDS and present <= _SERVED_KINDS else model


def layer_kinds(name: str) -> dict[str, set[str]]:
    """The kinds of layers of a type, by the field of its configuration that lists them."""
    found = vars(AutoConfig.for_model(name))
    fields = ((field, found.get(field)) for field in ("layer_types", "mlp_layer_types"))
    return {field: set(kinds) for field, kinds in fields if kinds}


def random_model(config):
    """A model in float32, whose logits are far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
    return model
