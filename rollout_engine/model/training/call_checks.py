"""Hooks that refuse calls of an exact model whose log-probs would differ from the engine's.

    before   on the device it was enabled on · not compiled · no autocast · right-padded · positions count up from 0
    after    no random numbers were drawn

The hooks are on the decoder below the head, which wrappers such as PEFT's call even if they bypass the causal LM.
"""

import inspect
import logging
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.composites import is_composite
from rollout_engine.model.modules.geometry import HARMLESS_TENSORS
from rollout_engine.model.modules.mixers import mixers_of
from rollout_engine.model.modules.packed_rows import (
    expect_packed_rows,
    positions_from,
    prefixes_are_shared,
    starts_of,
)

logger = logging.getLogger("rollout_engine")
_TEXT_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "labels", "past_key_values"} | HARMLESS_TENSORS
"""Inputs of a composite that are of its text."""
_state = threading.local()
_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def install_checks(decoder: nn.Module, device: torch.device) -> None:
    """Check every call of `decoder`, a Hugging Face model without its head that is exact on `device`."""
    decoder._exact_device_type = device.type  # type: ignore[assignment]
    decoder.register_forward_pre_hook(_before, with_kwargs=True)
    decoder.register_forward_hook(_after, always_call=True)


def warn_of_adapted_head(model: Any) -> None:
    """Have `model`, a causal LM, log a warning once if its head computes an adapter."""
    head = model.get_output_embeddings()
    is_adapted = isinstance(head, nn.Module) and "base_layer" in head._modules
    if is_adapted and _warn_of_head not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_warn_of_head)


def warn_once(model: nn.Module, text: str) -> None:
    """Log the warning `text`, once per model."""
    said = _said.setdefault(model, set())
    if text not in said:
        said.add(text)
        logger.warning("%s", text)


def refuse_moved(device: torch.device, enabled_on: str) -> None:
    """Raise `ConfigError` for a model that has moved to another kind of device since it was enabled."""
    if enabled_on != device.type:
        raise ConfigError(
            f"The model is on {device} but was made exact on {enabled_on}. Load it anew, move it to where it "
            "will stay, and only then call exact.enable."
        )


def _before(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        _refuse_compiled()
    parameter = next(decoder.parameters())
    refuse_moved(parameter.device, decoder._exact_device_type)
    _refuse_autocast(parameter)
    given = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | kwargs if args else kwargs
    _refuse_other_inputs(decoder, given)
    _refuse_cache(decoder, given.get("past_key_values"))
    _check_rows(given)
    if adapted := _live_adapter(decoder):
        warn_once(
            decoder,
            f"'{adapted}' has an adapter that is not merged, and that no engine computes as it does here, so log-probs "
            "are close, not equal. For one plain LoRA call exact.enable(model) on the wrapped model; merge others "
            "around the forward (merge_adapter()), or expect ratios that are not exactly 1.0.",
        )
    _state.random = _random_state(parameter.device)


def _after(decoder: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    expect_packed_rows(False)
    before, _state.random = getattr(_state, "random", None), None
    if before is None or output is None:
        return
    if torch.equal(before, _random_state(next(decoder.parameters()).device)):
        return
    if causes := _dropouts(decoder):
        raise ConfigError(
            f"{type(decoder).__name__} dropped activations at random in this forward ({', '.join(causes)}): no engine "
            "samples with dropout, so no log-prob would be equal. Load the model with these set to 0.0, or call "
            "model.eval()."
        )
    warn_once(
        decoder,
        f"{type(decoder).__name__} drew random numbers in its forward (noise on embeddings, perhaps). Where they "
        "change activations, log-probs are not those of the engine.",
    )


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _refuse_compiled() -> None:
    raise ConfigError(
        "An exact model was given to torch.compile, whose fused operations round otherwise than the engine's. Call the "
        "model itself: its linears, norms and attention are compiled kernels already."
    )


def _refuse_autocast(parameter: Tensor) -> None:
    kind = parameter.device.type
    if torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
        raise ConfigError(
            f"An exact model of {parameter.dtype} was called under autocast to {autocast}: some operations would be "
            "rounded where the engine's are not. Leave autocast (in Hugging Face's Trainer: bf16=False, fp16=False) "
            "and load the model in the engine's dtype, such as from_pretrained(..., dtype=torch.bfloat16); keep "
            "float32 masters in the optimizer if you need them."
        )


def _refuse_other_inputs(decoder: nn.Module, given: dict[str, Any]) -> None:
    """Raise `ValueError` if a composite is given more than text, once pictures are taken out of its call."""
    if not is_composite(decoder):
        return
    for name, value in given.items():
        settings = value if isinstance(value, list | tuple) else [value]
        is_of_text = name in _TEXT_INPUTS or all(isinstance(each, int | float | str | None) for each in settings)
        marks_none = "token_type_ids" in name and isinstance(value, Tensor) and not value.any()
        if not (is_of_text or marks_none):
            cause = getattr(decoder, "_exact_pictures_refused", "")
            parts, end = ("text alone", f": {cause}") if cause else ("text and pictures", ".")
            raise ValueError(
                f"An exact {type(decoder).__name__} computes {parts}, and was given {name}{end} Leave it out, or train "
                "on it with a model that is not exact."
            )


def _refuse_cache(decoder: nn.Module, cache: Any) -> None:
    """Raise `ConfigError` if layers that keep states are given some: not all such models attend."""
    if cache is not None and mixers_of(decoder):
        raise ConfigError(
            f"{type(decoder).__name__} was given past_key_values, but an exact model computes whole sequences. Pass "
            "use_cache=False, or generate with the engine."
        )


def _check_rows(given: dict[str, Any]) -> None:
    mask, positions, edges = (given.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    if isinstance(mask, Tensor) and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
        raise ValueError(
            "An exact model reads right-padded batches: attention_mask must be [B, T] and not rise along a row. "
            "Use exact.token_logprobs(model, input_ids, attention_mask), which accepts any padding."
        )
    if isinstance(positions, Tensor):
        expect_packed_rows(_is_packed(positions, mask if isinstance(mask, Tensor) else None))
    if isinstance(edges, Tensor):
        length = given["input_ids"].numel() if given.get("input_ids") is not None else given["inputs_embeds"].shape[1]
        if positions is None or not torch.equal(positions.flatten(), positions_from(edges, length)[0]):
            raise ValueError(
                "cu_seq_lens_q must come with the position_ids it stands for, which start again at 0 with every "
                f"sequence; got position_ids {'None' if positions is None else 'that differ'}. Pass both as the "
                "collator made them, or use exact.token_logprobs(model, input_ids, cu_seqlens=...)."
            )


def _is_packed(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether any row holds several sequences. Raises `ValueError` if positions do not decide it."""
    if positions.dim() != 2 or positions.is_floating_point():
        shape = tuple(positions.shape)
        raise ValueError(f"position_ids must be integers [B, T], got {positions.dtype} of shape {shape}")
    starts = starts_of(positions)
    if mask is not None:
        positions, starts = positions.expand(mask.shape), starts.expand(mask.shape) & mask.bool()
    wrong = (starts & (positions != 0)).nonzero()
    if len(wrong) and not prefixes_are_shared():
        row, place = wrong[0].tolist()
        raise ValueError(
            "position_ids must count up from 0 along each row, and start again at 0 where a packed sequence begins; "
            f"got {int(positions[row, place])} at [{row}, {place}]. An exact model cannot tell which tokens belong "
            "together otherwise. For left padding use exact.token_logprobs(model, input_ids, attention_mask)."
        )
    return bool(starts[:, 1:].any())


def _live_adapter(decoder: nn.Module) -> str | None:
    """The name of the first layer with an active PEFT adapter that is not merged."""
    for name, child in decoder.named_modules():
        if "base_layer" not in child._modules or getattr(child, "merged", False):
            continue
        if not getattr(child, "disable_adapters", False) and not getattr(child, "exact_adapter", None):
            return str(name)
    return None


def _warn_of_head(head: nn.Module, args: tuple[Any, ...]) -> None:
    if not getattr(head, "merged", False) and not getattr(head, "disable_adapters", False):
        warn_once(
            head,
            "The head has an adapter that is not merged, and no engine computes one there, so log-probs are not those "
            "of any engine. Leave the head out of target_modules, or merge around the forward (merge_adapter()) and "
            "send merged weights.",
        )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _dropouts(decoder: PreTrainedModel) -> list[str]:
    """Dropout settings above 0 in the configuration, else up to three active dropout modules."""
    config = decoder.config.to_dict()
    named = [f"{key}={value}" for key, value in config.items() if "drop" in key and isinstance(value, float) and value]
    drops = [
        f"{name}: p={child.p}"
        for name, child in decoder.named_modules()
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.training and child.p
    ]
    return named or drops[:3]
