"""The losses of Tinker's protocol, each a sum over the tokens of a batch.

cross_entropy          -sum(weights * logprobs)
importance_sampling    -sum(ratio * advantages), ratio = exp(logprobs - logprobs of the sampler)
ppo                    -sum(min(ratio * advantages, clip(ratio, low, high) * advantages))    (Schulman et al. 2017)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_training import TrainingExample

TARGETS = "target_tokens"
Loss: TypeAlias = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""Computes a loss of log-probs float32 [N], the other inputs [N] by name, and the loss's settings."""


def _cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    return -(inputs["weights"] * logprobs).sum()


def _importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


LOSSES: dict[str, tuple[Loss, frozenset[str], dict[str, float]]] = {
    "cross_entropy": (_cross_entropy, frozenset(("weights",)), {}),
    "importance_sampling": (_importance_sampling, frozenset(("logprobs", "advantages")), {}),
    "ppo": (
        _ppo,
        frozenset(("logprobs", "advantages")),
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
}
"""Name -> the loss, the inputs that it needs in addition to `target_tokens`, and its settings with their defaults."""


def check_examples(examples: Sequence[TrainingExample], loss: str, *, vocab_size: int, max_tokens: int) -> None:
    """Raise `RequestError` for examples that a loss cannot be computed of."""
    needed = LOSSES[loss][1] | {TARGETS}
    if not examples:
        raise RequestError.for_field("data", "no examples", "at least one")
    for i, example in enumerate(examples):
        where, names = f"data[{i}].loss_fn_inputs", set(example.inputs)
        if names != needed:
            raise RequestError.for_field(where, sorted(names), f"those of {loss}: {sorted(needed)}")
        if len(example.token_ids) > max_tokens:
            bound = f"at most {max_tokens}, the engine's max_model_len"
            raise RequestError.for_field(f"data[{i}].model_input", f"{len(example.token_ids)} tokens", bound)
        for name, ids in (("model_input", example.token_ids), (TARGETS, example.inputs[TARGETS])):
            if ids.min() < 0 or ids.max() >= vocab_size:
                wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
                raise RequestError.for_field(f"data[{i}].{name}", wrong, f"ids in [0, {vocab_size})")
        for name in needed - {TARGETS}:
            if not np.isfinite(example.inputs[name]).all():
                raise RequestError.for_field(f"{where}['{name}']", "values that are not finite", "finite numbers")


def settings_of(loss: str, config: Mapping[str, float]) -> dict[str, float]:
    """All settings of a loss. Raises `RequestError` for unknown ones."""
    defaults = LOSSES[loss][2]
    for name in config:
        if name not in defaults:
            bound = f"one of {sorted(defaults)}" if defaults else f"absent: {loss} has no settings"
            raise RequestError.for_field("loss_fn_config", name, bound)
    return {**defaults, **config}
