"""Runs the forward of one module over parts of known results, and records its reads and its differences."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION_NAME = "rollout_engine_pattern"
"""The attention function that a forward in a trial finds in its configuration."""
NUM_TOKENS = 3
"""Tokens of a trial."""
READS_POSITIONS = "computes with positions"
"""Part of the reason of a forward that operates on positions."""
SCALES = (1e-3, 1.0, 1e4)
"""Sizes of inputs: a clamp, or a cap by tanh, changes the large ones."""
_ANYWHERE = {"config", "layer_idx", "training", "hidden_size"}
_ATTENTION = (
    _ANYWHERE
    | {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "sliding_window", "use_rope"}
    | {"out_proj", "q_layernorm", "k_layernorm"}
    | {"num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups", "is_causal"}
    | {"attention_dropout", "residual_dropout", "layer_type", "attention_type"}
    | {"config._attn_implementation", "config.sliding_window"}
)
_KNOWN = {
    "attention": _ATTENTION,
    "scaled attention": _ATTENTION | {"config.rope_parameters"},
    "mixture": _ANYWHERE
    | {"gate", "router", "experts", "shared_expert", "shared_experts", "shared_expert_gate", "e_score_correction_bias"}
    | {"num_experts", "top_k", "hidden_dim", "ffn_dim", "input_size", "jitter_noise", "input_jitter_noise"}
    | {"enable_moe_fp32_combine", "routed_scaling_factor", "fc1_latent_proj", "fc2_latent_proj"}
    | {"use_expert_bias", "expert_bias"},
    "layer": _ANYWHERE
    | {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "residual_multiplier", "residual_dropout"}
    | {"layer_type", "attention_type", "gradient_checkpointing", "linear_attn", "block_type"}
    | {"operator_norm", "ffn_norm", "feed_forward", "conv", "is_attention_layer"}
    | {"mamba", "pre_ff_layernorm", "block_sparse_moe", "shared_mlp", "has_experts", "norm", "mixer"}
    | {"post_feedforward_layernorm"},
    "delta rule": _ANYWHERE
    | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj", "norm"}
    | {"conv1d", "activation", "conv_kernel_size", "A_log", "dt_bias", "fix_query_key_value_ordering"}
    | {"head_k_dim", "head_v_dim", "key_dim", "value_dim", "num_k_heads", "num_v_heads"}
    | {"q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj", "allow_neg_eigval"},
    "short convolution": _ANYWHERE | {"in_proj", "out_proj", "conv", "conv_kernel_size"},
    "Mamba 2": _ANYWHERE
    | {"in_proj", "out_proj", "norm", "conv1d", "A_log", "dt_bias", "D", "activation", "conv_kernel_size"}
    | {"num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim", "chunk_size"}
    | {"time_step_limit"},
    "base": _ANYWHERE
    | {"embed_tokens", "layers", "norm", "rotary_emb", "gradient_checkpointing", "has_sliding_layers"}
    | {"embedding_multiplier", "embedding_norm", "pos_emb", "final_layernorm", "config.layers_block_type"}
    | {"embeddings", "norm_f"}
    | {"config._attn_implementation", "config.is_causal", "config.layer_types", "config.num_hidden_layers"}
    | {"config.sliding_window"},
    "head": _ANYWHERE
    | {"model", "lm_head", "vocab_size", "num_experts", "num_experts_per_tok", "router_aux_loss_coef"}
    | {"config.output_router_logits", "config.logits_scaling"},
    "latents": {"kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
    "indexer": {"wq_b", "wk", "k_norm", "weights_proj", "n_heads", "head_dim", "qk_rope_head_dim", "softmax_scale"}
    | {"index_topk", "layer_idx"},
}
"""Names that a forward may read: its parts, sizes, and numbers that act on every token alike."""
_MODELS = {
    "indexer": "DeepSeek-V3.2's",
    "short convolution": "LFM2's",
    "Mamba 2": "Bamba's",
    "delta rule": "Qwen3-Next's",
}
"""The owner of the forward that each kind is compared with; "Llama's" for all others."""


class _Trial:
    """A module in whose place forwards read: `parts` replace its own, names that are read are recorded."""

    def __init__(self, target: Any, parts: dict[str, object], prefix: str = "", reads: set[str] | None = None) -> None:
        self.__dict__.update(_target=target, _parts=parts, _prefix=prefix, _reads=set() if reads is None else reads)

    @property  # type: ignore[misc]  # object lets it be set
    def __class__(self) -> Any:  # for `super()`
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        self._reads.add(self._prefix + name)
        if name in self._parts:
            return self._parts[name]
        value = getattr(self._target, name)
        if isinstance(value, MethodType) and value.__self__ is self._target and not self._prefix:
            return MethodType(value.__func__, self)  # which reads names through this too
        is_config = name == "config" and not self._prefix
        return _Trial(value, {"_attn_implementation": ATTENTION_NAME}, "config.", self._reads) if is_config else value


class Mismatch(Exception):
    """A forward does something that Llama's does not, as the end of a sentence that begins with its class."""


def unmatched_reason(
    kind: str, module: nn.Module, run: Callable[["Forward"], None], method: str = "forward"
) -> str | None:
    """Why the forward of `module`, or another method, is not that of its `kind`, which `run` tries; None if it is.

    `run` raises `Mismatch`, by `require`, if the forward computes something else.
    """
    name = type(module).__name__
    if method in vars(module):
        return f"the {method} of {name} was replaced"
    trial = Forward(module, method)
    try:
        with torch.no_grad():
            run(trial)
    except Mismatch as problem:
        return f"{name} {problem}"
    except Exception as problem:  # foreign modules may fail in any way
        model = _MODELS.get(kind, "Llama's")
        return f"{name} does not run as {model} does ({type(problem).__name__}: {problem})"
    if strangers := sorted(trial.reads - _KNOWN[kind]):
        return f"{name} reads {', '.join(strangers)}, which its pattern does not allow"
    return None


class Forward:
    """Calls the forward of `module`, or another method, over other parts."""

    def __init__(self, module: nn.Module, method: str = "forward") -> None:
        self._module = module
        self._function = inspect.unwrap(getattr(type(module), method))
        self.reads: set[str] = set()
        self.children = dict(module.named_children())

    def __call__(self, parts: dict[str, object], *args: Any, **kwargs: Any) -> Any:
        return self._function(_Trial(self._module, parts, reads=self.reads), *args, **kwargs)


class _WatchedPositions(Tensor):
    """Positions; an operation on them is a `Mismatch`, unless it is a view that repeats them or takes some copies."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = func is Tensor.expand or (func is Tensor.__getitem__ and not isinstance(args[1], Tensor))
        if getattr(func, "__name__", "") == "__get__" or is_view:  # a shape, a device
            return super().__torch_function__(func, types, args, kwargs or {})
        raise Mismatch(f"{READS_POSITIONS} ({getattr(func, '__name__', func)})")


def watched_positions() -> Tensor:
    """Positions int64 [1, T] that allow no operation but views of copies of them."""
    return torch.arange(NUM_TOKENS)[None].as_subclass(_WatchedPositions)


def layer_inputs(rotations: object, positions: Tensor | None = None) -> dict[str, object]:
    """Arguments of a layer's forward; `positions` int64 [T] that it may read; None: it may read none."""
    return {
        "position_embeddings": rotations,
        "attention_mask": None,
        "position_ids": watched_positions() if positions is None else positions[None],
        "past_key_values": None,
        "use_cache": False,
    }


def are_watched(found: Tensor, positions: Tensor) -> bool:
    """Whether `found` is `positions`, the result of `watched_positions`, or copies of them [..., 1, T]."""
    values, wanted = (each.as_subclass(Tensor) for each in (found, positions))
    return isinstance(found, _WatchedPositions) and torch.equal(values, wanted.expand_as(values))


def waves(*shape: int, phase: float) -> Tensor:
    """Fixed irregular numbers; nothing is drawn from torch's generator."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 0.7 + phase).square().sin().view(shape)


def require(condition: bool, otherwise: str) -> None:
    """Raise `Mismatch` with `otherwise`, unless `condition` holds."""
    if not condition:
        raise Mismatch(otherwise)


def require_same(found: Tensor, wanted: Tensor, otherwise: str) -> None:
    """Raise `Mismatch` with `otherwise`, unless the tensors are equal up to round-off."""
    require(found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), otherwise)
