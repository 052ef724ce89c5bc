"""`enable`, which gives a trainer's model the engine's arithmetic."""

from typing import Any, NamedTuple

import torch
from torch import nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.provenance import note_sent, sent_weights, weights_state
from rollout_engine.model.admission.tower_trial import PictureTrial, try_pictures
from rollout_engine.model.backend import Arithmetic
from rollout_engine.model.backends import arithmetic_of
from rollout_engine.model.modules.composites import is_composite, text_parts
from rollout_engine.model.modules.rotary import refuse_long_batches
from rollout_engine.model.packing.output_head import set_float32_head
from rollout_engine.model.training.adapted_layers import make_adapters_exact, plain_model, without_adapters
from rollout_engine.model.training.call_checks import install_checks, refuse_moved, warn_of_adapted_head
from rollout_engine.model.training.picture_calls import make_pictures_exact


def enable(model: nn.Module, *, fp32_head: bool | None = None) -> nn.Module:
    """Make a Hugging Face causal LM compute the engine's values bit for bit; in place, and return it.

    Of a composite with vision the tower is made exact as well, if it can be, and calls with pictures are computed: the
    forward takes them as transformers' does. Other inputs than text and these are refused, with the cause.
    Linears, norms, attention and SiLU are replaced by the engine's. Parameters, their names, optimizers and
    `save_pretrained` are unaffected; the next forward sees every write to a parameter, however it was made. Batches
    must be right-padded or packed (`token_logprobs` accepts any padding). Call it again after replacing modules;
    calling it twice is harmless. Enable the model itself, on the device on which it will stay, before it is wrapped
    (DDP, FSDP). Of a `PeftModel` one active LoRA is computed as an engine computes it that has the adapter
    (`add_lora`), with gradients of its matrices. Dropout, autocast and `torch.compile` are refused at the first
    forward that uses them. `fp32_head=True` is for engines with that option: logits of a bfloat16 model in float32;
    None leaves the head as it is. Raises `ConfigError` for a model that cannot be exact.
    """
    wrapped, model = model, plain_model(model)
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"exact.enable expects a Hugging Face causal LM, not {type(model).__name__}. Enable the model before it is "
            "wrapped."
        )
    _refuse_dtypes(model)
    device, enabled = next(model.parameters()).device, enabled_of(model)
    if enabled is not None:
        refuse_moved(device, enabled.device_type)
    arithmetic = arithmetic_of(device)
    causal_lm: Any = model  # nn.Module declares none of the attributes below
    with without_adapters(model):
        parts: list[Any] = text_parts(model)
        parts[0].set_attn_implementation(arithmetic.attention_name)
        for part in parts:
            arithmetic.make_row_invariant(part)
        if fp32_head is not None:
            set_float32_head(model, fp32_head)
        if is_composite(model):
            make_pictures_exact(model, arithmetic.make_row_invariant, *_try_pictures(model, device))
        if unproven := arithmetic.unproven_parts(model):
            raise ConfigError(
                f"{type(model).__name__} cannot be exact: {len(unproven)} of its parts compute rows that may depend on "
                f"the batch, such as {unproven[0]}."
            )
    make_adapters_exact(model, arithmetic.add_adapter)
    warn_of_adapted_head(model)
    if enabled is None:
        install_checks(causal_lm.base_model, device)
        refuse_long_batches(causal_lm.base_model)
        causal_lm._rollout_engine_exact = Enabled(arithmetic, device.type, causal_lm)
        if sent_weights(wrapped) is None:
            note_sent(wrapped, weights_state(wrapped), None)
    return wrapped


def _refuse_dtypes(model: nn.Module) -> None:
    """Refuse float16 parameters, and rotary frequencies that a cast of the model has rounded."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float16:
            raise ConfigError(
                f"'{name}' is {parameter.dtype}, in which no engine computes exactly. Load the model with "
                "from_pretrained(..., dtype=torch.bfloat16) or torch.float32, as the engine."
            )
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ConfigError(
                f"'{name}' is {buffer.dtype}, so it rotates positions otherwise than the engine does. Load the model "
                "with from_pretrained(..., dtype=torch.bfloat16) instead of casting it afterwards."
            )


def _try_pictures(composite: Any, device: torch.device) -> PictureTrial:
    """Whether, and how, calls of a composite with pictures are computed."""
    if device.type != "cpu":
        return PictureTrial("pictures are served on a CPU only.")
    return try_pictures(composite.config)


class Enabled(NamedTuple):
    """Record that `enable` stores on a model."""

    arithmetic: Arithmetic
    device_type: str
    model: Any
    """The model inside any wrapper."""


def enabled_of(model: nn.Module) -> Enabled | None:
    """The record on a model, or on the model inside a wrapper."""
    notes = (child.__dict__.get("_rollout_engine_exact") for child in model.modules())
    return next((note for note in notes if note is not None), None)
