"""Quantised checkpoints in an engine: the weights of the plain checkpoint that they denote."""

import json
import logging

import pytest
import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.checkpoint import read_entries
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.ranks.part import Part, Region
from rollout_engine.model.ranks.share import Share
from rollout_engine.testing import tiny_checkpoint, tiny_config
from rollout_engine.testing.architectures import SIZES
from tests.quantised_files import quantise_checkpoint, quantise_experts


def state_of(directory, dtype) -> dict[str, torch.Tensor]:
    loaded = load_model(EngineConfig(model=str(directory), dtype=dtype))
    return {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}


def assert_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "architecture", "dtype"),
    [
        ("fp8-blocks", "qwen3", "bfloat16"),
        ("fp8-tensor", "qwen3_moe", "float32"),
        ("pack4-group-asymmetric", "qwen3", "bfloat16"),
        ("awq", "qwen3", "float32"),
        ("gptq4-v2-desc-act", "qwen3", "bfloat16"),
    ],
)
def test_an_engine_has_the_weights_rounded_once(tmp_path, name, architecture, dtype, caplog):
    sizes = dict(moe_intermediate_size=40, num_experts=3, num_experts_per_tok=2) if architecture == "qwen3_moe" else {}
    plain, quantised = tiny_checkpoint(tmp_path / "plain", architecture, **sizes), tmp_path / "quantised"
    quantise_checkpoint(plain, quantised, name)
    with caplog.at_level(logging.INFO, "sync"):
        found = state_of(quantised, dtype)
    assert_equal(found, state_of(plain, dtype))
    assert caplog.text.count("dequantised in float32") == 1


def test_experts_of_gpt_oss_are_dequantised(tmp_path):
    sizes = SIZES["gpt_oss"] | dict(hidden_size=64, intermediate_size=32)
    plain = tiny_checkpoint(tmp_path / "plain", "gpt_oss", **sizes)
    quantised = tmp_path / "quantised"
    assert quantise_experts(plain, quantised) == 4
    assert_equal(state_of(quantised, "bfloat16"), state_of(plain, "bfloat16"))


def test_a_rank_has_its_part_of_a_dequantised_weight(tmp_path):
    quantise_checkpoint(tiny_checkpoint(tmp_path / "plain"), tmp_path / "quantised", "gptq4")
    table = WeightTable.of(construct(tiny_config(), dtype=torch.float32, attention="eager"))
    table.load(read_entries(tmp_path / "plain"))
    parts, expected = {}, {}
    for name, view in table.views.items():
        if view.dim() == 2 and "down_proj" in name:
            share = Share(3, 9, view.shape[1])
            parts[name] = Part(torch.empty(len(view), 6), Region(0, view.numel(), share))
            expected[name] = view[:, share.rows].clone()
        else:
            rows = len(view) // 2
            size = view.numel() // len(view)
            parts[name] = Part(torch.empty(rows, *view.shape[1:]), Region(size, (rows + 1) * size))
            expected[name] = view[1 : rows + 1].clone()
    table.load(read_entries(tmp_path / "quantised"), parts=parts)
    assert_equal({name: part.view for name, part in parts.items()}, expected)


def test_a_format_that_is_not_read_is_refused_by_name(tmp_path):
    tiny_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ConfigError, match=r"config\.json: .*quant_method 'hqq' is not read"):
        load_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size"])
def test_a_configuration_of_a_far_larger_model_is_refused_before_it_has_memory(tmp_path, name):
    tiny_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: 10**9}))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(EngineConfig(model=str(tmp_path)))
