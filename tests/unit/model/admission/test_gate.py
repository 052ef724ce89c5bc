from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.admission import gate
from rollout_engine.model.admission.gate import admit, build_module
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import Refusal
from rollout_engine.model.modules.positions import position_limit
from rollout_engine.testing import tiny_config
from sync.own_files import CACHE_VARIABLE

MOE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def serve(config):
    return admit(build_module(config, torch.float32, ATTENTION_NAME))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_three_families_are_admitted(empty_cache, architecture):
    assert len(serve(tiny_config(architecture))) == 2


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("bloom", {}, "attention interface"),
        ("mpt", {}, "attention interface"),
        ("gptj", {}, "does not build it"),
        ("t5", {}, "encoder-decoder"),
        ("bert", {}, "bidirectional"),
        ("jamba", {}, "layers of kind mamba"),
        ("llama4_text", MOE, "chunked_attention"),
        ("diffllama", {}, "called for layers"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(empty_cache, architecture, overrides, reason):
    with pytest.raises(ConfigError, match=rf"model_type '{architecture}'\) cannot be served exactly: .*{reason}"):
        serve(tiny_config(architecture, **overrides))


def test_falcon_is_refused(empty_cache):
    config = AutoConfig.for_model("falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=259)
    with pytest.raises(ConfigError, match="'falcon'.* cannot be served exactly"):
        serve(config)


def test_the_number_of_threads_is_left_as_it_was(empty_cache):
    before = torch.get_num_threads()
    serve(tiny_config("qwen3"))
    assert torch.get_num_threads() == before


def test_an_architecture_is_checked_once(empty_cache, monkeypatch):
    first = serve(tiny_config("qwen3"))
    monkeypatch.setattr(gate, "check_numerics", lambda *_: pytest.fail("checked again"))
    assert serve(tiny_config("qwen3")) == first


def test_a_refusal_is_not_kept(empty_cache, monkeypatch):
    def refuse(*_):
        raise Refusal("of the weather")

    with monkeypatch.context() as patch:
        patch.setattr(gate, "check_numerics", refuse)
        with pytest.raises(ConfigError, match="of the weather"):
            serve(tiny_config("qwen3"))
    assert len(serve(tiny_config("qwen3"))) == 2


def test_positions_end_where_the_checkpoint_says():
    assert position_limit(tiny_config("qwen3", max_position_embeddings=777)) == 777
    assert position_limit(AutoConfig.for_model("bloom")) is None


def test_dynamic_frequencies_end_at_the_original_length():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert position_limit(tiny_config("llama", rope_parameters=rope)) == 2048


def test_longrope_ends_at_the_original_length():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }
    assert position_limit(tiny_config("llama", rope_parameters=rope)) == 256


def test_longrope_of_some_layers_counts():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    config = SimpleNamespace(
        max_position_embeddings=4096, rope_parameters={"full_attention": rope, "sliding_attention": None}
    )
    assert position_limit(config) == 128
