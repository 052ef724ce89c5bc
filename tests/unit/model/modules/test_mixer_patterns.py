"""Mixers are recognised by their results and inputs: one that computes something else keeps its forward."""

import inspect
import textwrap

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mixer_patterns import delta_pattern
from rollout_engine.model.modules.mixers import swap_mixers
from rollout_engine.testing import tiny_config
from rollout_engine.testing.architectures import HYBRID_SIZES


def pattern_of(architecture, change=lambda mixer: None):
    module = construct(tiny_config(architecture, **HYBRID_SIZES[architecture]), dtype=torch.float32, attention="eager")
    mixer = module.model.layers[0].linear_attn
    change(mixer)
    swap_mixers(module)
    return delta_pattern(mixer, probe_geometry(module)[0].state)


def test_columns_are_found_whatever_their_order():
    side_by_side, by_group = pattern_of("qwen3_5_text"), pattern_of("qwen3_next")
    assert side_by_side.reason is by_group.reason is None
    assert side_by_side.num_groups == by_group.num_groups == 2
    assert side_by_side.convolved == list(range(2 * 16 + 48))
    assert (side_by_side.betas, side_by_side.decays) == ([128, 129, 130, 131], [132, 133, 134, 135])
    assert by_group.convolved[:16] == [*range(8), *range(64, 72)]
    assert by_group.gates == [40, 52, 104, 116]
    assert (by_group.betas, by_group.decays) == ([128, 129, 132, 133], [130, 131, 134, 135])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("b.sigmoid()", "2 * b.sigmoid()", "has other gates"),
        ("b.sigmoid()", "b.sigmoid().clamp(max=0.9)", "has other rates of writing"),
        ("+ self.dt_bias", "+ 2 * self.dt_bias", "has other decays"),
        ("use_qk_l2norm_in_kernel=True", "use_qk_l2norm_in_kernel=False", "does not normalise queries and keys"),
        ("self.norm(core_attn_out, z)", "self.norm(core_attn_out, 2 * z)", "reads gates that are no neighbours"),
        ("self.norm(core_attn_out, z)", "self.norm(core_attn_out.clamp(max=9), z)", "norms something else"),
        ("self.out_proj(core_attn_out)", "self.out_proj(core_attn_out + 1)", "projects something else than its norm"),
        ("z = self.in_proj_z(hidden_states)", "z = self.in_proj_z(2 * hidden_states)", "projects another input"),
        ("beta = b", "beta = (b + self.layer_norm_epsilon - self.layer_norm_epsilon)", "reads layer_norm_epsilon"),
    ],
)
def test_another_formula_is_not_recognised(before, after, reason):
    source = textwrap.dedent(inspect.getsource(Qwen3_5GatedDeltaNet.forward))
    assert before in source
    made = {}
    exec(source.replace(before, after), modeling_qwen3_5.__dict__, made)  # as if transformers had written it

    def change(mixer):
        mixer.__class__ = type("Other", (Qwen3_5GatedDeltaNet,), made)

    found = pattern_of("qwen3_5_text", change).reason
    assert found == reason or reason in found


def test_another_activation_is_not_recognised():
    module = construct(
        tiny_config("qwen3_5_text", **HYBRID_SIZES["qwen3_5_text"]), dtype=torch.float32, attention="eager"
    )
    swap_mixers(module)
    mixer, state = module.model.layers[0].linear_attn, probe_geometry(module)[0].state
    mixer.activation = "gelu"
    assert delta_pattern(mixer, state).reason == "Qwen3_5GatedDeltaNet has no SiLU behind its convolution"
