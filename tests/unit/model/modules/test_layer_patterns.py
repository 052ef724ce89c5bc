"""Forwards are recognised as Llama's by what they compute and read, and by nothing that a few tokens cannot show."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from rollout_engine.model.modules.block_patterns import BlockPattern, base_pattern, head_pattern, layer_pattern
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.layer_patterns import attention_pattern
from rollout_engine.testing import tiny_config
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES
from rollout_engine.testing.tiny_pictures import tiny_vision_config

FUSED = "cwm granite internlm3 iquestcoder llama mistral mixtral qwen2 qwen3 qwen3_moe seed_oss smollm3".split()


def build(architecture="llama", **overrides):
    config = tiny_config(architecture, **(SIZES | HYBRID_SIZES).get(architecture, {}) | overrides)
    return construct(config, dtype=torch.float32, attention="eager")


FAR = torch.tensor([0, 5, 39, 40, 79, 80, 2_000, 200_000])


def attention_reason(attention, geometry):
    return attention_pattern(attention, geometry, FAR).reason


def layer_reason(layer):
    return layer_pattern(layer).reason


def base_reason(base):
    return base_pattern(base).reason


def head_reason(model):
    return head_pattern(model).reason


def reasons(module):
    [geometry, *_] = probe_geometry(module)
    layer = module.model.layers[0]
    return [
        attention_reason(layer.self_attn, geometry),
        layer_reason(layer),
        base_reason(module.model),
        head_reason(module),
    ]


@pytest.mark.quick(10)
@pytest.mark.parametrize("architecture", FUSED)
def test_architectures_that_compute_what_llama_does_are_recognised(architecture):
    assert reasons(build(architecture)) == [None] * 4


@pytest.mark.parametrize(
    ("architecture", "overrides", "part", "reason"),
    [
        ("olmo", {}, 0, r"reads config.clip_qkv"),
        ("olmo", dict(clip_qkv=50.0), 0, r"computes queries otherwise"),
        ("ernie4_5", {}, 0, r"computes queries otherwise"),
        ("olmoe", {}, 0, r"norms queries or keys over more than one head"),
        ("nanochat", {}, 2, r"does more than embed"),
        ("cohere", {}, 3, r"changes its logits"),
    ],
)
def test_others_are_not_and_the_reason_names_the_part(architecture, overrides, part, reason):
    module = build(architecture, **overrides)
    layer = module.model.layers[0]
    found = [
        lambda: attention_reason(layer.self_attn, probe_geometry(module)[0]),
        lambda: layer_reason(layer),
        lambda: base_reason(module.model),
        lambda: head_reason(module),
    ][part]()
    assert reason in found


def test_factors_of_queries_are_found_and_are_those_of_every_position():
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=40)
    module = build("ministral3", rope_parameters=rope | dict(llama_4_scaling_beta=0.5))
    pattern = attention_pattern(module.model.layers[0].self_attn, probe_geometry(module)[0], FAR)
    assert pattern.reason is None
    positions = torch.tensor([1_999, 0, 39, 40, 3_000, 81])
    for dtype in (torch.float32, torch.bfloat16):
        wanted = (1 + 0.5 * torch.log(1 + torch.floor(positions / 40))).to(dtype)
        assert torch.equal(pattern.query_factors.rows(positions, torch.empty(0, dtype=dtype)), wanted)
    assert attention_pattern(build().model.layers[0].self_attn, probe_geometry(build())[0], FAR) == (None, None, False)


@pytest.mark.parametrize("architecture", ["lfm2", "bamba", "granitemoehybrid"])
def test_layers_with_mixers_add_their_parts_as_llamas_do(architecture):
    module = build(architecture)
    assert [layer_reason(layer) for layer in module.model.layers] == [None] * 3
    assert base_reason(module.model) is head_reason(module) is None


def test_numbers_of_layers_bases_and_heads_are_found():
    module = build("granite", residual_multiplier=0.22, embedding_multiplier=12, logits_scaling=6.5)
    assert layer_pattern(module.model.layers[0]) == BlockPattern(None, 0.22)
    assert base_pattern(module.model) == BlockPattern(None, 12)
    assert head_pattern(module) == BlockPattern(None, 6.5)
    module.model.layers[0].residual_multiplier = "0.22"
    assert "does not run" in layer_reason(module.model.layers[0])
    llama = build()
    llama.model.layers[0].residual_multiplier = 0.5  # which its forward does not read
    assert "adds its parts otherwise" in layer_reason(llama.model.layers[0])


class ScaledResults(LlamaAttention):
    def forward(self, hidden_states, position_ids, **kwargs):
        factors = (1 + position_ids // 40)[..., None]
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)[0] * factors, None


class ScaledInputs(LlamaAttention):
    def forward(self, hidden_states, position_ids, **kwargs):
        factors = (1 + position_ids // 40)[..., None]
        return super().forward(hidden_states * factors, position_ids=position_ids, **kwargs)


class BatchFactors(LlamaAttention):
    """The factor is that of the largest position of the batch."""

    def forward(self, hidden_states, position_embeddings, position_ids, **kwargs):
        cos, sin = position_embeddings
        factor = 1 + position_ids.max() // 40
        rotations = cos * factor, sin * factor
        return super().forward(hidden_states, position_embeddings=rotations, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("kind", [ScaledResults, ScaledInputs, BatchFactors])
def test_other_uses_of_positions_are_not_factors_of_queries(kind):
    module = build()
    attention = module.model.layers[0].self_attn
    attention.__class__ = kind
    pattern = attention_pattern(attention, probe_geometry(module)[0], FAR)
    assert "computes with positions" in pattern.reason and pattern.query_factors is None


class LongAttention(LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        if hidden_states.shape[1] > self.config.length_of_any_name:
            hidden_states = hidden_states * 2
        return super().forward(hidden_states, **kwargs)


class SwitchedAttention(LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states * (2 if self.of_any_name else 1), **kwargs)


class FarAttention(LlamaAttention):
    def forward(self, hidden_states, position_ids, **kwargs):
        factor = 1 + (position_ids >= 100_000)[..., None]
        return super().forward(hidden_states * factor, position_ids=position_ids, **kwargs)


class CappedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return LlamaDecoderLayer.forward.__wrapped__(self, hidden_states, **kwargs).clamp(-100, 100)


class FarModel(LlamaModel):
    def forward(self, input_ids, position_ids, **kwargs):
        return super().forward(input_ids, position_ids=position_ids.clamp(max=100_000), **kwargs)


class MovedModel(LlamaModel):
    def forward(self, input_ids, position_ids, **kwargs):
        return super().forward(input_ids, position_ids=position_ids[:, [1, 0, 2]], **kwargs)


class CappedLogits(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 500 * torch.tanh(output.logits / 500)
        return output


@pytest.mark.parametrize(
    ("path", "kind", "part", "reason"),
    [
        ("model.layers.0.self_attn", LongAttention, 0, "reads config.length_of_any_name"),
        ("model.layers.0.self_attn", SwitchedAttention, 0, "reads of_any_name"),
        ("model.layers.0.self_attn", FarAttention, 0, "computes with positions"),
        ("model.layers.0", CappedLayer, 1, "adds its parts otherwise"),
        ("model", FarModel, 2, "computes with positions"),
        ("model", MovedModel, 2, "rotates by other positions"),
        ("", CappedLogits, 3, "changes its logits"),
    ],
)
def test_what_shows_at_lengths_positions_and_values_beyond_any_trial_is_seen(path, kind, part, reason):
    module = build()
    geometry = probe_geometry(module)[0]
    module.config.length_of_any_name = 100_000
    child = module.get_submodule(path)
    child.of_any_name = False
    child.__class__ = kind
    check = [lambda c: attention_reason(c, geometry), layer_reason, base_reason, head_reason][part]
    assert reason in check(child)


def test_a_base_may_repeat_positions_for_the_axes_of_pictures():
    config = tiny_vision_config("qwen3_vl").get_text_config()
    module = construct(config, dtype=torch.float32, attention="eager")
    assert base_reason(module.model) is None


def test_a_forward_that_was_replaced_is_not_recognised():
    module = build()
    layer = module.model.layers[0]
    layer.forward = layer.forward
    assert "was replaced" in layer_reason(layer)


def test_parameters_that_attention_passes_on_are_those_of_the_geometry():
    module = build("mistral")
    geometry = probe_geometry(module)[0]
    attention = module.model.layers[0].self_attn
    assert attention_reason(attention, geometry) is None
    attention.scaling *= 2
    assert "other parameters" in attention_reason(attention, geometry)
