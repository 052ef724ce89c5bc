"""Scales of logits that a composite leaves out, though its text model's configuration has them.

    Cohere2ForCausalLM               lm_head(hidden) * logit_scale
    AyaVisionForConditionalGeneration    lm_head(hidden)

Trainers compute the composite, and an engine has the log-probs of trainers. So its text model is served without such a
scale if a small copy shows that the composite of transformers has none.
"""

import copy
import logging
from typing import Any

import torch
from transformers import PretrainedConfig

from rollout_engine.model.admission.self_check import TOLERANCE, shorten_config, spread_weights, thin_config
from rollout_engine.model.modules.composites import twin_with
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.one_thread import one_thread

logger = logging.getLogger("rollout_engine")

_SCALES = ("logit_scale", "logits_scaling")
"""Fields of text configurations by which logits are multiplied or divided (Cohere; Granite)."""
_LAYERS = 2


def without_unused_scales(whole: PretrainedConfig, text: PretrainedConfig) -> PretrainedConfig:
    """`text`, or a copy in which the scales of logits that its composite leaves out are 1.

    `whole`: the configuration of the composite. Raises `Refusal` if transformers cannot build it.
    """
    given = [name for name in _SCALES if getattr(text, name, None) not in (None, 1, 1.0)]
    if not given or _uses_scales(whole, text):
        return text
    plain = copy.deepcopy(text)
    for name in given:
        setattr(plain, name, 1.0)
    return plain


def warn_of_unused_scales(whole: PretrainedConfig, text: PretrainedConfig, served: PretrainedConfig) -> None:
    """Log the scales of `text` that `served`, as `without_unused_scales` gives it, has no more."""
    names = [name for name in _SCALES if getattr(text, name, None) != getattr(served, name, None)]
    if names:
        logger.warning(
            "The text model has %s, which %s of transformers leaves out: so does the engine, which samples from the "
            "distribution that trainers compute.",
            ", ".join(f"{name}={getattr(text, name)}" for name in names),
            (whole.architectures or [type(whole).__name__])[0],
        )


def keep_scales(source: PretrainedConfig, target: Any) -> None:
    """Write the scales of logits of one text model's configuration into another one, which will be saved."""
    for name in _SCALES:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


@torch.no_grad()
def _uses_scales(whole: PretrainedConfig, text: PretrainedConfig) -> bool:
    """Whether a small composite has the logits of its text model, or fails, which the gate reports."""
    try:
        with one_thread():
            small = thin_config(shorten_config(text, list(range(min(_LAYERS, text.num_hidden_layers)))))
            alone = construct(small, dtype=torch.float32, attention="eager")
            spread_weights(alone)
            tokens = torch.arange(1, 9)[None]
            wanted = twin_with(whole, alone)(input_ids=tokens, use_cache=False).logits
            found = alone(input_ids=tokens, use_cache=False).logits
    except Exception:  # foreign models may not allow any size
        return True
    return float((found - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE
