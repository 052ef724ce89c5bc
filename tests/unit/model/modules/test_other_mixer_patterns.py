"""Short convolutions and Mamba 2's recurrence are recognised by their results and inputs."""

import inspect
import textwrap

import pytest
import torch
from transformers.models.bamba import modeling_bamba
from transformers.models.lfm2 import modeling_lfm2

from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mamba_patterns import mamba_pattern
from rollout_engine.model.modules.mixers import swap_mixers
from rollout_engine.model.modules.short_convolution_patterns import convolution_pattern
from rollout_engine.testing import tiny_config
from rollout_engine.testing.architectures import HYBRID_SIZES


def pattern_of(architecture, replaced=None):
    """The pattern of the first layer's mixer, in whose forward a piece of text is replaced by another."""
    module = construct(tiny_config(architecture, **HYBRID_SIZES[architecture]), dtype=torch.float32, attention="eager")
    layer = module.model.layers[0]
    mixer, pattern, file = (
        (layer.conv, convolution_pattern, modeling_lfm2)
        if architecture == "lfm2"
        else (layer.mamba, mamba_pattern, modeling_bamba)
    )
    if replaced is not None:
        before, after = replaced
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(mixer).forward)))
        source = source[source.index("def forward") :]
        assert before in source
        made = {}
        exec(source.replace(before, after), file.__dict__, made)  # as if transformers had written it
        mixer.__class__ = type("Other", (type(mixer),), made)
    swap_mixers(module)
    return pattern(mixer, probe_geometry(module)[0].state)


def test_columns_are_found():
    assert pattern_of("lfm2") == (None, 0, 96, 48)
    bamba = pattern_of("bamba")
    assert (bamba.reason, bamba.num_groups, bamba.gates) == (None, 2, 0)
    assert bamba.convolved == tuple(range(96, 96 + 96 + 2 * 2 * 8))
    assert bamba.steps == tuple(range(224, 230))
    assert pattern_of("granitemoehybrid").steps == bamba.steps


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("B * x", "B + x", "reads its columns otherwise"),
        ("B * x", "B * x.clamp(max=3000)", "convolves something else"),
        ("C * hidden_states", "C.flip(1) * hidden_states", "gates its convolution otherwise"),
        ("C * hidden_states", "C * hidden_states * hidden_states", "reads its columns otherwise"),
        ("self.conv.bias, **kwargs", "self.conv.bias, 'silu', **kwargs", "has an activation"),
        ("self.in_proj(hidden_states)", "self.in_proj(2 * hidden_states)", "projects another input"),
        ("y = self.out_proj(y)", "y = self.out_proj(y) if self.bias else y", "reads bias"),
    ],
)
def test_another_convolution_is_not_recognised(before, after, reason):
    assert reason in pattern_of("lfm2", (before, after)).reason


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("-torch.exp(self.A_log.float())", "-2 * torch.exp(self.A_log.float())", "has other decays"),
        ("dt_softplus=True", "dt_softplus=False", "has steps without softplus"),
        ("D=self.D", "D=2 * self.D", "gives its recurrence other vectors"),
        ("self.norm(scan_output, gate)", "self.norm(scan_output, 2 * gate)", "reads gates that are no neighbours"),
        ("self.norm(scan_output, gate)", "self.norm(scan_output, gate.clamp(max=9999))", "changes its gates"),
        ("self.norm(scan_output, gate)", "self.norm(scan_output * 2, gate)", "norms something else"),
        ("scan_output.to(dtype)", "scan_output.to(dtype) + self.use_bias", "reads use_bias"),
        ("self.in_proj(hidden_states)", "self.in_proj(hidden_states + 1)", "projects another input"),
    ],
)
def test_another_recurrence_is_not_recognised(before, after, reason):
    assert reason in pattern_of("bamba", (before, after)).reason
