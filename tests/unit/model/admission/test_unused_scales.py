"""Scales of logits that composites of transformers leave out."""

import pytest
from transformers import CONFIG_MAPPING

from rollout_engine import LLM, exact
from rollout_engine.model.admission.gate import text_config_to_serve
from rollout_engine.testing import tiny_config
from rollout_engine.testing.tiny_pictures import tiny_vision_checkpoint, tiny_vision_config
from tests.integration.composites import COMPOSITES


def test_the_text_of_aya_vision_is_served_without_its_scale(caplog):
    config = CONFIG_MAPPING["aya_vision"](**COMPOSITES["aya_vision"])
    assert text_config_to_serve(config).logit_scale == 1.0
    assert config.text_config.logit_scale == 0.0625, "the checkpoint's own stays"
    assert "has logit_scale=0.0625, which AyaVisionConfig of transformers leaves out" in caplog.text


def test_so_is_granite_in_llava_next():
    text = COMPOSITES["llava_next"]["text_config"] | dict(model_type="granite", logits_scaling=8.0)
    config = CONFIG_MAPPING["llava_next"](**COMPOSITES["llava_next"] | dict(text_config=text))
    assert text_config_to_serve(config).logits_scaling == 1.0


@pytest.mark.parametrize("make", [lambda: tiny_config("cohere2"), lambda: tiny_vision_config("llava")])
def test_other_configurations_are_served_as_they_are(make):
    config = make()
    assert text_config_to_serve(config) is config.get_text_config()


@pytest.mark.slow
def test_a_directory_with_the_scale_updates_an_engine_without_it(tmp_path):
    path = tiny_vision_checkpoint(tmp_path, "aya_vision")
    with LLM(path, dtype="float32", num_kv_blocks=32, max_model_len=128, log_stats=False) as llm:
        llm.update_weights(path)
        assert llm.policy_version == 1


@pytest.mark.slow
def test_a_trainers_configuration_keeps_the_scale(tmp_path):
    model = exact.load(tiny_vision_checkpoint(tmp_path, "aya_vision"), dtype="float32")
    assert model.config.text_config.logit_scale == 0.0625
