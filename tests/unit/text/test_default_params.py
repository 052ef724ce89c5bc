"""The sampling settings a checkpoint recommends are told when asked for."""

import json

import pytest

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.text.default_params import read_default_params


@pytest.mark.parametrize(
    "recommended, params",
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20, "repetition_penalty": 1.1}, {"top_k": 20, "repetition_penalty": 1.1}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"eos_token_id": 2}, {}),
    ],
)
def test_recommended_settings_are_read_by_our_names(tmp_path, recommended, params):
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert read_default_params(str(tmp_path)) == SamplingParams(**params)


def test_a_checkpoint_that_recommends_nothing_leaves_the_defaults(tmp_path):
    assert read_default_params(str(tmp_path)) == SamplingParams()


def test_a_broken_file_and_a_broken_value_are_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config.json cannot be read"):
        read_default_params(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"min_p": 2.0}')
    with pytest.raises(RequestError, match="min_p=2"):
        read_default_params(str(tmp_path))
