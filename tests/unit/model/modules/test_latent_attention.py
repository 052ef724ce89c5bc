"""Attention that expands latents is recognised by what it computes, and then hands over latents."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels import latent
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention
from rollout_engine.model.cpu.flat_batch import SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.construct import construct, initialize
from rollout_engine.model.modules.geometry import LayerGeometry, probe_geometry
from rollout_engine.model.modules.latent_attention import cache_latents, has_latents, latent_reason, products_of
from rollout_engine.testing import tiny_config
from rollout_engine.testing.architectures import SIZES

pytestmark = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"), reason="a release with expanded keys alone"
)
DENSE = SIZES["deepseek_v3"] | dict(first_k_dense_replace=2, mlp_layer_types=["dense", "dense"])


def build(architecture="deepseek_v3", **overrides):
    config = tiny_config(architecture, **DENSE | overrides)
    module = construct(config, dtype=torch.float32, attention=ATTENTION_NAME)
    initialize(module)
    return module


def attention_of(module):
    return module.model.layers[0].self_attn


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_architectures_that_expand_latents_are_recognised(architecture):
    module = build(architecture)
    names = list(module.state_dict())
    before = probe_geometry(module)
    cache_latents(module)
    assert has_latents(module) and list(module.state_dict()) == names
    fields = dict(num_heads=3, num_kv_heads=1, head_dim_k=24, head_dim_v=16, sliding_window=None, softcap=None)
    wanted = LayerGeometry(**fields, scale=before[0].scale, has_sinks=False, has_latents=True)
    assert probe_geometry(module) == [wanted, wanted]
    assert wanted.cached_per_token == 16 + 8
    assert before[0].cached_per_token == 3 * (24 + 12)


def test_results_are_those_of_expanded_keys():
    module = build()
    ids = torch.arange(3, 80)[None]
    before = module(input_ids=ids, use_cache=False).logits
    twin = copy.deepcopy(module)
    cache_latents(twin)
    again = copy.deepcopy(twin)
    cache_latents(again)  # calling it twice is harmless
    torch.testing.assert_close(twin(input_ids=ids, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(again(input_ids=ids).logits, twin(input_ids=ids).logits)
    assert not has_latents(module)


class ScaledLatents(DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        return super().expand_kv(kv_nope * 1.01, k_rot)


class OtherOrder(DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys.flip(1), values


class ReadsMore(DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        factor = 2.0 if self.config.num_hidden_layers > 40 else 1.0
        return super().expand_kv(kv_nope * factor, k_rot)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ScaledLatents, "changes latents"),
        (OtherOrder, "makes other keys"),
        (ReadsMore, "reads config, config.num_hidden_layers"),
    ],
)
def test_other_expansions_stay_expanded(kind, reason):
    module = build(q_lora_rank=24)
    for layer in module.model.layers:
        layer.self_attn.__class__ = kind
    assert reason in latent_reason(attention_of(module))
    cache_latents(module)
    assert not has_latents(module)
    assert not probe_geometry(module)[0].has_latents


def test_a_bias_or_another_dtype_stays_expanded():
    module = build()
    for layer in module.model.layers:
        layer.self_attn.kv_b_proj.bias = nn.Parameter(torch.zeros(layer.self_attn.kv_b_proj.out_features))
    assert "without a bias" in latent_reason(attention_of(module))
    other = build()
    for layer in other.model.layers:
        layer.self_attn.kv_b_proj.bfloat16()
    for each in (module, other):
        cache_latents(each)
        assert not has_latents(each)


def test_llama_has_none():
    module = construct(tiny_config("llama"), dtype=torch.float32, attention=ATTENTION_NAME)
    cache_latents(module)
    assert not has_latents(module)
    assert products_of(module.model.layers[0].self_attn, torch.zeros(1), torch.zeros(1)) is None


def test_latents_that_were_changed_on_their_way_are_refused():
    module = build()
    cache_latents(module)
    attention = attention_of(module)
    keys, values = attention.expand_kv(torch.ones(1, 1, 5, 16), torch.ones(1, 1, 5, 8))
    assert keys.shape == (1, 1, 5, 24) and torch.equal(values, torch.ones(1, 1, 5, 16))
    assert products_of(attention, keys, values) is attention.kv_b_proj
    with pytest.raises(ConfigError, match="changes its latents before attention"):
        products_of(attention, keys * 2, values)
    with pytest.raises(ConfigError, match="kv_b_proj was called"):
        attention.kv_b_proj(torch.ones(1, 16))


def test_parameters_of_scores_are_those_of_the_module(monkeypatch):
    seen = []
    module = build()
    cache_latents(module)
    real = AttentionParams

    def noted(*fields):
        seen.append(real(*fields))
        return seen[-1]

    monkeypatch.setattr("rollout_engine.model.modules.attention_interface.AttentionParams", noted)
    module(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert seen == [real(attention_of(module).scaling)] * 2


def test_the_eager_pool_holds_latents_too(monkeypatch):
    module = build()
    ids = list(range(3, 43))
    wanted = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    cache_latents(module)
    for kernels in (attention, latent.compiled):
        monkeypatch.setattr(kernels, "supports", lambda *given: False)
    model = CpuModel(module, probe_geometry(module), num_blocks=3, block_size=16)
    assert [tuple(tensor.shape) for tensor in model.kv.tensors()] == [(3, 1, 16, 24)] * 2
    chunks = [SequenceChunk(ids[first:end], first, [2, 0, 1]) for first, end in ((0, 17), (17, 39), (39, 40))]
    found = [model.forward([chunk], range(len(chunk.token_ids))).clone() for chunk in chunks]
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-4, atol=1e-4)
