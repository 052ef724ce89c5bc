"""The trial of a composite's pictures: which pass, and why others are refused."""

import pytest
import torch.nn.functional as F
from transformers import CONFIG_MAPPING

from rollout_engine.kernels.attention_params import Reach
from rollout_engine.model.admission import tower_trial
from rollout_engine.model.admission.tower_trial import PictureTrial, tower_refusal, try_pictures
from rollout_engine.model.pictures import tower_attention, tower_products
from rollout_engine.testing.tiny_pictures import tiny_vision_config
from tests.integration.composites import COMPOSITES

FAMILIES = "qwen2_5_vl qwen3_vl qwen3_5 mistral3 llava llava_next idefics3 smolvlm internvl aya_vision kimi_k25".split()
OTHERS = "qwen2_vl qwen3_vl_moe qwen3_5_moe glm4v glm4v_moe".split()
QUICK = {"qwen3_vl"}
SEE_ALL = {"gemma3": "all", "gemma4": "windows"}
"""Families in which tokens of a picture see all of it, and the layers that let them."""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(make, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, make in [
            *((name, lambda name=name: tiny_vision_config(name)) for name in FAMILIES),
            *((name, lambda name=name: CONFIG_MAPPING[name](**COMPOSITES[name])) for name in OTHERS),
        ]
    ],
)
def test_pictures_of_these_families_are_exact(config, monkeypatch):
    assert try_pictures(config()) == PictureTrial("", "causal")
    monkeypatch.setattr(tower_trial, "_check_pictures", None)
    assert try_pictures(config()) == PictureTrial("", "causal"), "it is known"


@pytest.mark.parametrize("family", ["gemma3", pytest.param("gemma4", marks=pytest.mark.slow)])
def test_which_layers_let_tokens_of_a_picture_see_it_is_found_by_trying(family, monkeypatch):
    assert try_pictures(tiny_vision_config(family)) == PictureTrial("", SEE_ALL[family])
    monkeypatch.setattr(tower_trial, "_check_pictures", None)
    assert try_pictures(tiny_vision_config(family)) == PictureTrial("", SEE_ALL[family]), "it is known"


@pytest.mark.slow
def test_small_sizes_of_a_family_may_have_causal_attention():
    small = tiny_vision_config("gemma4", use_bidirectional_attention=None)
    assert try_pictures(small) == PictureTrial("", "causal")


def refusal_of(name, **vision):
    config = tiny_vision_config(name)
    for field, value in vision.items():
        setattr(config.vision_config, field, value)
    return tower_refusal(config)


def test_a_product_that_is_not_ours_is_refused(monkeypatch):
    monkeypatch.delitem(tower_products._REPLACED, F.conv3d)
    assert "its tower has products of its own (convolution)" in refusal_of("qwen2_5_vl", window_size=24)


def test_other_features_than_those_of_transformers_are_refused(monkeypatch):
    def doubled(q, k, v, mask, scale, plain=tower_attention._Attention.apply):
        return plain(q, k, v, mask, scale * 2)

    monkeypatch.setattr(tower_attention._Attention, "apply", doubled)
    assert "its features differ from transformers' own by" in refusal_of("qwen2_5_vl", window_size=32)


def test_attention_of_another_kind_and_composites_without_a_tower_are_refused(monkeypatch):
    monkeypatch.setattr(Reach, "of", lambda reach, params: None)
    assert "whether their tokens see one another in both directions or not" in refusal_of(
        "gemma3", intermediate_size=80
    )
    config = CONFIG_MAPPING["gemma4"](**COMPOSITES["gemma4"])
    assert "it has no vision tower" in tower_refusal(config)
