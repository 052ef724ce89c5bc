import pytest
import torch
from transformers import masking_utils

from rollout_engine.model.cpu.attention import CpuKVPool
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import LayerGeometry, Refusal, kv_pools, probe_geometry
from rollout_engine.testing import tiny_config, tiny_model
from rollout_engine.testing.architectures import SIZES

DEEPSEEK = dict(
    head_dim=8,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    q_lora_rank=32,
    kv_lora_rank=16,
    num_key_value_heads=4,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
MOE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def build(architecture: str, **overrides):
    return construct(tiny_config(architecture, **overrides), dtype=torch.float32, attention="eager")


def layer(**fields) -> LayerGeometry:
    plain = dict(
        num_heads=4,
        num_kv_heads=2,
        head_dim_k=16,
        head_dim_v=16,
        scale=0.25,
        sliding_window=None,
        softcap=None,
        has_sinks=False,
    )
    return LayerGeometry(**(plain | fields))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_plain_causal_layers(architecture):
    assert probe_geometry(build(architecture)) == [layer(), layer()]


def test_keys_and_values_may_differ_in_size():
    (first, _) = probe_geometry(build("deepseek_v3", **DEEPSEEK))
    assert first == layer(num_kv_heads=4, head_dim_k=24, head_dim_v=12, scale=24**-0.5)


def test_windows_softcaps_and_scales_are_seen_per_layer():
    module = build("gemma2", sliding_window=32, query_pre_attn_scalar=64, attn_logit_softcapping=30.0)
    windowed = layer(scale=0.125, sliding_window=32, softcap=30.0)
    assert probe_geometry(module) == [windowed, layer(scale=0.125, softcap=30.0)]


def test_a_window_of_some_layers_only():
    module = build("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert probe_geometry(module) == [layer(), layer(sliding_window=8)]


def test_sinks_are_seen():
    assert all(g.has_sinks for g in probe_geometry(build("gpt_oss", **MOE)))


def test_layers_that_read_the_keys_of_others_are_seen():
    found = probe_geometry(build("gemma4_text", **SIZES["gemma4_text"]))
    assert [each.kv_layer for each in found] == [None, None, None, 2, 1, 1]


def test_such_layers_have_the_pool_of_the_layer_that_they_read():
    geometry = probe_geometry(build("gemma4_text", **SIZES["gemma4_text"]))
    pool = CpuKVPool(geometry, num_blocks=2, block_size=4, dtype=torch.float32)
    assert len(list(pool.tensors())) == 2 * 3
    pools = list(kv_pools(geometry, lambda layer: object()).values())
    assert [pools.index(each) for each in pools] == [0, 1, 2, 2, 1, 1]


def test_the_module_is_left_as_it_was():
    module = tiny_model("qwen3", attn_implementation="eager")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    probe_geometry(module)
    assert module.config._attn_implementation == "eager"
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_weights_need_no_values():
    module = build("qwen3")
    for parameter in module.parameters():
        parameter.fill_(float("nan"))
    assert probe_geometry(module) == [layer(), layer()]


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("bloom", {}, "does not work through the attention interface"),
        ("diffllama", {}, r"called for layers \[0, 0, 1, 1\]"),
        ("phimoe", MOE | dict(sliding_window=8), "its mask has window 8, but it tells attention None"),
        ("olmoe", MOE | dict(sliding_window=8), "its mask has window None, but it tells attention 8"),
        ("llama4_text", MOE | dict(attention_chunk_size=16), "chunked"),
    ],
)
def test_anything_else_is_refused_with_the_reason(architecture, overrides, reason):
    with pytest.raises(Refusal, match=reason):
        probe_geometry(build(architecture, **overrides))


def test_bidirectional_attention_is_refused():
    module = build("qwen3")
    module.model.layers[1].self_attn.is_causal = False
    with pytest.raises(Refusal, match="bidirectional"):
        probe_geometry(module)


def test_attention_that_goes_past_the_interface_is_refused():
    module = build("qwen3")
    for block in module.model.layers:
        block.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(Refusal, match="never calls"):
        probe_geometry(module)


def test_a_tensor_of_unknown_meaning_is_refused():
    module = build("qwen3")
    attention = module.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: plain(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(Refusal, match="position_bias"):
        probe_geometry(module)


def test_a_mask_that_changes_at_far_positions_is_refused(monkeypatch):
    module = build("qwen3")
    mask = masking_utils.causal_mask_function
    monkeypatch.setattr(
        masking_utils, "causal_mask_function", lambda b, h, q, kv: mask(b, h, q, kv) & (q // 50_000 == kv // 50_000)
    )
    with pytest.raises(Refusal, match="mask is of an unknown kind"):
        probe_geometry(module)


def test_geometry_may_be_asked_for_at_any_position():
    module = build("gemma2", sliding_window=32)
    assert probe_geometry(module, 2_000) == probe_geometry(module)
