"""Names of the tiny models that take pictures."""

import pytest

from rollout_engine import ConfigError
from rollout_engine.testing.tiny_pictures import tiny_vision_checkpoint, tiny_vision_model, vision_tokenizer


@pytest.mark.parametrize("make", [tiny_vision_model, vision_tokenizer])
def test_an_unknown_family_is_refused_with_the_names_of_all(make, tmp_path):
    with pytest.raises(ConfigError, match=r"Unknown family 'qwen2vl'.*There are .*idefics3.*qwen2_5_vl, .*smolvlm"):
        make("qwen2vl")
    with pytest.raises(ConfigError, match="Unknown family 'none'"):
        tiny_vision_checkpoint(tmp_path, "none")
    assert not list(tmp_path.iterdir())
