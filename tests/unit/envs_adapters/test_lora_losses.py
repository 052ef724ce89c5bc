"""The losses of Tinker's protocol beside their formulas."""

import math

import pytest
import torch

from envs_adapters.trainers.lora_losses import LOSSES, settings_of
from rollout_engine.base.errors import RequestError

NEW, OLD, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [1.0, -2.0, 3.0]
RATIOS = [math.exp(n - o) for n, o in zip(NEW, OLD, strict=True)]


def value_and_gradient(loss, inputs, **config):
    logprobs = torch.tensor(NEW, requires_grad=True)
    value = LOSSES[loss][0](logprobs, {k: torch.tensor(v) for k, v in inputs.items()}, settings_of(loss, config))
    value.backward()
    return value.item(), logprobs.grad.tolist()


def test_cross_entropy_is_the_weighted_sum():
    value, gradient = value_and_gradient("cross_entropy", {"weights": [0.0, 1.0, 2.0]})
    assert value == pytest.approx(3.0) and gradient == [0.0, -1.0, -2.0]


def test_importance_sampling_weighs_advantages_by_ratios():
    value, gradient = value_and_gradient("importance_sampling", {"logprobs": OLD, "advantages": ADVANTAGES})
    terms = [r * a for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert value == pytest.approx(-sum(terms)) and gradient == pytest.approx([-each for each in terms])


def test_ppo_clips_ratios():
    value, gradient = value_and_gradient("ppo", {"logprobs": OLD, "advantages": ADVANTAGES})
    clipped = [min(max(r, 0.8), 1.2) for r in RATIOS]
    terms = [min(r * a, c * a) for r, c, a in zip(RATIOS, clipped, ADVANTAGES, strict=True)]
    assert value == pytest.approx(-sum(terms))
    assert gradient == pytest.approx([0.0, 0.0, -3.0])  # 1.65 and 0.37 are clipped, each to its harm
    wide, _ = value_and_gradient(
        "ppo", {"logprobs": OLD, "advantages": ADVANTAGES}, clip_low_threshold=0.0, clip_high_threshold=10.0
    )
    assert wide == pytest.approx(-sum(r * a for r, a in zip(RATIOS, ADVANTAGES, strict=True)))


def test_an_unknown_setting_is_refused():
    with pytest.raises(RequestError, match="clip_high_threshold"):
        settings_of("ppo", {"clip": 0.2})
