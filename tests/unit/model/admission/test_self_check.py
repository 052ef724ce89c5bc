import msgspec
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaPreTrainedModel

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.model.admission import self_check
from rollout_engine.model.admission.self_check import check_numerics
from rollout_engine.model.modules import attention_interface
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import Refusal, probe_geometry
from rollout_engine.testing import tiny_config


def build(architecture: str, **overrides) -> PreTrainedModel:
    return construct(tiny_config(architecture, **overrides), dtype=torch.float32, attention=ATTENTION_NAME)


def check(architecture: str, **overrides) -> None:
    module = build(architecture, **overrides)
    check_numerics(module, probe_geometry(module))


ADMITTED = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4096, max_window_layers=1)),
    ("mistral", dict(sliding_window=4096)),
    ("gemma2", {}),
    ("gpt_neox", {}),
    ("apertus", {}),  # parameters and buffers that its architecture does not initialise
    ("gpt_oss", dict(num_local_experts=4, num_experts_per_tok=2)),  # attention sinks
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("architecture", "overrides"), ADMITTED)
def test_right_attention_passes(architecture, overrides):
    check(architecture, **overrides)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("architecture", "overrides", "fault"),
    [
        ("llama", {}, lambda s: s._replace(scale=s.scale * 1.05)),
        ("qwen2", {}, lambda s: s._replace(scale=s.scale * 1.05)),
        ("qwen3", {}, lambda s: s._replace(scale=s.scale * 1.05)),
        ("gemma2", {}, lambda s: s._replace(scale=s.scale * 1.05)),
        ("gemma2", {}, lambda s: s._replace(softcap=0.0)),
        ("mistral", dict(sliding_window=4096), lambda s: s._replace(sliding_window=s.sliding_window + 1)),
        ("mistral", dict(sliding_window=4096), lambda s: s._replace(sliding_window=s.sliding_window - 1)),
        ("mistral", dict(sliding_window=4096), lambda s: s._replace(sliding_window=0)),
    ],
)
def test_faulty_attention_is_refused(monkeypatch, architecture, overrides, fault):
    monkeypatch.setattr(attention_interface, "AttentionParams", lambda *fields: fault(AttentionParams(*fields)))
    with pytest.raises(Refusal, match="logits differ"):
        check(architecture, **overrides)


def test_a_nan_is_a_difference(monkeypatch):
    monkeypatch.setattr(
        attention_interface, "AttentionParams", lambda *fields: AttentionParams(*fields)._replace(scale=float("nan"))
    )
    with pytest.raises(Refusal, match="differ from transformers' own by nan"):
        check("qwen3")


def test_a_buffer_that_nobody_computes_is_a_difference(monkeypatch):
    module = build("llama")
    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(Refusal, match="differ from transformers' own by nan"):
        check_numerics(module, probe_geometry(module))


def test_a_forward_that_fails_is_a_refusal(monkeypatch):
    def broken(*fields):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(attention_interface, "AttentionParams", broken)
    with pytest.raises(Refusal, match="fails over the paged cache .*no such kernel"):
        check("qwen3")


def test_a_large_model_is_checked_on_a_small_copy(monkeypatch):
    sizes = []
    compare = self_check._relative_error

    def watch(engine, reference, geometry):
        sizes.append(sum(p.numel() for p in engine.parameters()))
        return compare(engine, reference, geometry)

    monkeypatch.setattr(self_check, "_relative_error", watch)
    sizes_of_heads = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    module = build("qwen3", **sizes_of_heads)
    geometry = probe_geometry(module)
    module.config.update(dict(hidden_size=4096, intermediate_size=12288, vocab_size=151936))
    check_numerics(module, geometry)
    assert sizes[0] < 8_000_000


def test_every_kind_of_layer_is_in_the_copy(monkeypatch):
    seen = []
    monkeypatch.setattr(self_check, "_relative_error", lambda engine, reference, geometry: seen.extend(geometry) or 0.0)
    check("gemma3_text", num_hidden_layers=12, sliding_window=4096)
    assert [g.sliding_window for g in seen] == [8] * 5 + [None]


def test_a_copy_that_changes_its_kind_is_not_trusted(monkeypatch):
    module = build("qwen3")
    geometry = [msgspec.structs.replace(layer, scale=1.0) for layer in probe_geometry(module)]
    with pytest.raises(Refusal, match="no small copy .*changed with its size"):
        check_numerics(module, geometry)


def test_an_architecture_that_cannot_be_built_small_is_refused(monkeypatch):
    def picky(*args, **kwargs):
        raise ValueError("too small for me")

    module = build("qwen3")
    geometry = probe_geometry(module)
    monkeypatch.setattr(self_check, "construct", picky)
    with pytest.raises(Refusal, match="no small copy .*too small for me"):
        check_numerics(module, geometry)


def test_steps_compute_every_token_once_and_end_in_single_tokens():
    lengths = (19, 7, 26)
    done = [0, 0, 0]
    for step in self_check._steps(lengths):
        for s, first, end in step:
            assert first == done[s] < end
            assert end <= lengths[s] - 3 or end == first + 1
            done[s] = end
    assert tuple(done) == lengths


class LateAttention(LlamaAttention):
    """Inputs count twice from position `floor_scale` on; `by_place`: from that place in a batch's row on."""

    by_place = False

    def forward(self, hidden_states, position_ids, **kwargs):
        places = torch.arange(hidden_states.shape[1])[None] if self.by_place else position_ids
        late = (places >= self.config.floor_scale)[..., None]
        return super().forward(hidden_states * (1 + late), position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("length", [12, 1_000])
def test_what_changes_with_positions_is_admitted(monkeypatch, length):
    monkeypatch.setattr(modeling_llama, "LlamaAttention", LateAttention)
    check("llama", floor_scale=length)


@pytest.mark.parametrize("length", [12, 100_000])
def test_what_changes_with_places_in_a_row_is_refused(monkeypatch, length):
    monkeypatch.setattr(modeling_llama, "LlamaAttention", LateAttention)
    monkeypatch.setattr(LateAttention, "by_place", True)
    with pytest.raises(Refusal, match="logits differ"):
        check("llama", floor_scale=length)


def test_frequencies_that_depend_on_the_batch_are_refused(monkeypatch):
    """Of a kind that `rotary_limit` does not know."""
    plain = modeling_llama.LlamaRotaryEmbedding.forward

    def forward(self, x, position_ids):
        return plain(self, x, position_ids * (1 + (position_ids.max() > 1_500)))

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", forward)
    with pytest.raises(Refusal, match="logits at far positions differ"):
        check("llama")


def test_parameters_of_attention_that_change_with_positions_are_refused(monkeypatch):
    class Scaled(LlamaAttention):
        def forward(self, hidden_states, position_ids, **kwargs):
            self.scaling = 0.5 if position_ids.max() > 1_500 else 0.25
            return super().forward(hidden_states, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Scaled)
    with pytest.raises(Refusal, match="other parameters from position"):
        check("llama")


TEMPERATURE = dict(layer_types=["full_attention"] * 2, no_rope_layers=[0, 0], use_qk_norm=False)


def test_a_temperature_that_counts_the_tokens_of_a_row_is_refused():
    """Llama 4's, which has no positions: its floor is 8,192 tokens."""
    small = dict(num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64)
    check("llama4_text", attn_temperature_tuning=False, **small, **TEMPERATURE)
    with pytest.raises(Refusal, match="logits differ"):
        check("llama4_text", **small, **TEMPERATURE)


def test_a_layer_of_every_setting_is_in_the_copy(monkeypatch):
    seen = []
    monkeypatch.setattr(self_check, "_relative_error", lambda engine, reference, geometry: seen.extend(geometry) or 0.0)
    check("smollm3", num_hidden_layers=12)
    assert len(seen) == 4  # of which the last does not rotate
