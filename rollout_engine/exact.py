"""The trainer's side of the numerics contract: the engine's own arithmetic, with gradients.

    model = exact.enable(AutoModelForCausalLM.from_pretrained(...))            # .to("cuda"), before it is enabled
    logprobs = exact.token_logprobs(model, batch["tokens", "full"], batch["masks", "all_attention_mask"])

`logprobs[:, i]` belongs to token `i + 1` and equals the engine's `batch["log_probs", "full"][:, i + 1]` bit for bit,
wherever a token's whole context was computed under the trainer's current weights. On-policy ratios are exactly 1.0.
A model on the CPU computes as engines on the CPU do, one on a CUDA device as engines with `device="cuda",
deterministic=True`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.errors import ConfigError
from rollout_engine.kernels.token_logprobs import token_logprobs as _logprobs_of_rows
from rollout_engine.model.arithmetic import ON_HOST, Arithmetic, arithmetic_of
from rollout_engine.model.fusion import repack
from rollout_engine.model.rotary import refuse_long_batches


def enable(model: nn.Module) -> nn.Module:
    """Make a Hugging Face causal LM compute what the engine computes; in place, and returned.

    Linears, norms, attention and SiLU are replaced by the engine's; parameters, their names, optimizers and
    `save_pretrained` are unaffected. Batches must be right-padded (`token_logprobs` accepts any padding). Call it again
    after replacing modules; calling it twice is harmless. Dropout must be off, and the model on the device on which it
    will stay. Raises `ConfigError` for a model that cannot be exact.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"exact.enable expects a Hugging Face causal LM, not {type(model).__name__}.")
    _refuse_rounded_rotary(model)
    _refuse_moved(model)
    arithmetic = arithmetic_of(_device_of(model))
    model.set_attn_implementation(arithmetic.attention_name)
    arithmetic.make_row_invariant(model)
    if unproven := arithmetic.unproven_parts(model):
        raise ConfigError(
            f"{type(model).__name__} cannot be exact: {len(unproven)} of its parts compute rows that may depend on the "
            f"batch, such as {unproven[0]}."
        )
    if _enabled(model) is None:
        model.register_forward_pre_hook(_check_call, with_kwargs=True)
        refuse_long_batches(model)
        model._rollout_engine_exact = _Enabled(arithmetic, _device_of(model).type)
    return model


def refresh(model: nn.Module) -> None:
    """Rebuild packed weights after writes autograd cannot see (`parameter.data.copy_`). Optimizers need no call."""
    repack(model)


def token_logprobs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Log-prob of each next token: input_ids int64 [B, T] -> float32 [B, T - 1], differentiable.

    Entry `[:, i]` is log softmax(logits_i / temperature)[token i + 1]; 0 where token i or i + 1 is padding.
    `attention_mask` [B, T] may pad on either side or between tokens. temperature 0 counts as 1, as in the engine.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [B, T], got shape {tuple(input_ids.shape)}")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask must be {tuple(input_ids.shape)} like input_ids, got {tuple(mask.shape)}")
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # real tokens to the left, in order
    packed, real = input_ids.gather(1, order), mask.gather(1, order)
    result = _right_padded_logprobs(model, packed, real, temperature or 1.0)
    if torch.equal(real, mask):
        return result
    spread = result.new_zeros(input_ids.shape).scatter(1, order[:, 1:], result)  # entry of token order[i + 1]
    return spread[:, 1:]


def _right_padded_logprobs(model: nn.Module, input_ids: Tensor, real: Tensor, temperature: float) -> Tensor:
    length = max(int(real.sum(1).max()), 2)
    logits = model(input_ids=input_ids[:, :length], use_cache=False).logits[:, :-1]
    wanted = real[:, 1:length]
    chosen = input_ids[:, 1:length][wanted]
    enabled = _enabled(model)  # engines on the CPU score by modules that nobody has enabled
    arithmetic = ON_HOST if enabled is None else enabled.arithmetic
    values = _logprobs_of_rows(logits[wanted], chosen, temperature, arithmetic.figures_of)
    result = values.new_zeros(input_ids.shape[0], input_ids.shape[1] - 1)
    row, column = wanted.nonzero(as_tuple=True)
    return result.index_put((row, column), values)


def _refuse_rounded_rotary(model: nn.Module) -> None:
    """`model.to(torch.bfloat16)` rounds the rotary frequencies too, which the engine keeps in float32."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ConfigError(
                f"'{name}' is {buffer.dtype}, so it rotates positions otherwise than the engine does. Load the model "
                "with from_pretrained(..., dtype=torch.bfloat16) instead of casting it afterwards."
            )


class _Enabled(NamedTuple):
    """What is noted on a model."""

    arithmetic: Arithmetic
    device_type: str


def _enabled(model: nn.Module) -> _Enabled | None:
    return getattr(model, "_rollout_engine_exact", None)


def _refuse_moved(model: nn.Module) -> None:
    enabled, device = _enabled(model), _device_of(model)
    if enabled is not None and enabled.device_type != device.type:
        raise ConfigError(
            f"The model is on {device} but was made exact on {enabled.device_type}. Load it anew, move it to where it "
            "will stay, and only then call exact.enable."
        )


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _refuse_moved(model)
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is None or not isinstance(mask, Tensor):
        return
    if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "An exact model reads right-padded batches: attention_mask must be [B, T] and not rise along a row. "
            "Use exact.token_logprobs(model, input_ids, attention_mask), which accepts any padding."
        )
