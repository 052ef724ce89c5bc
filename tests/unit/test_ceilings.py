"""Dimensions of models for the limits that `bench` reports: products, and bytes of the KV pool."""

import pytest
import torch

from rollout_engine import LLM
from rollout_engine.base.errors import ConfigError
from rollout_engine.cli.ceilings import Dimensions
from rollout_engine.model.loading.loader import find_geometry
from rollout_engine.testing import tiny_checkpoint, tiny_config
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES


def dimensions_of(path, architecture, **fields):
    tiny_config(architecture, **fields).save_pretrained(path)
    return Dimensions.of(*find_geometry(str(path), torch.bfloat16), torch.bfloat16)


def test_dimensions_count_every_weight_that_a_step_reads(tmp_path):
    dims = dimensions_of(tmp_path, "qwen3")
    assert dims.layers == [(64 + 2 * 32, 64), (64, 64), (320, 64), (64, 160)] * 2
    assert dims.head == (259, 64) and dims.experts is None
    assert dims.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_dimensions_of_a_mixture_count_the_experts_that_a_step_reads(tmp_path):
    dims = dimensions_of(tmp_path, "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    assert dims.layers == [(64 + 2 * 32, 64), (64, 64), (8, 64)] * 2 and dims.num_expert_layers == 2
    assert dims.experts.products == ((96, 64), (64, 48))
    assert dims.experts.num_active(1) == pytest.approx(2) and dims.experts.num_active(1000) == pytest.approx(8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe_lite", "gemma4_text", "mimo_v2_flash"])
def test_kv_bytes_of_a_token_are_those_of_the_pool(tmp_path, architecture):
    dims = dimensions_of(tmp_path / "config", architecture, **SIZES[architecture])
    checkpoint = tiny_checkpoint(tmp_path / "model", architecture, **SIZES[architecture])
    with LLM(checkpoint, dtype="bfloat16", num_kv_blocks=8, log_stats=False) as llm:
        pool = llm.frontend.client.driver.executor.worker.runner.model.kv.tensors()
        info = llm.frontend.client.info
        assert dims.kv_bytes_per_token * info.block_size * info.num_blocks == sum(each.nbytes for each in pool)


def test_dimensions_of_latents_count_the_products_before_and_after_attention(tmp_path):
    dims = dimensions_of(tmp_path, "deepseek_v3", **SIZES["deepseek_v3"])
    attention = [(24, 48), (3 * 24, 24), (16 + 8, 48), *[(16, 16), (12, 16)] * 3, (48, 3 * 12)]
    experts = [(8, 48), (2 * 40, 48), (48, 40)]  # the router, and an expert that all tokens share
    assert dims.layers == [*attention, (2 * 160, 48), (48, 160), *attention, *experts]
    assert dims.num_expert_layers == 1 and dims.kv_bytes_per_token == 2 * 24 * 2


def test_dimensions_of_layers_with_states_are_not_known(tmp_path):
    with pytest.raises(ConfigError, match="not known of lfm2, which has layers that keep states"):
        dimensions_of(tmp_path, "lfm2", **HYBRID_SIZES["lfm2"])
