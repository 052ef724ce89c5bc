"""Queries that are scaled by their positions (Ministral 3): fused layers compute what modules and trainers do."""

import pytest

from rollout_engine.model.cuda import decoder_parts, decoder_trial, model
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.testing import tiny_model

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
ROPE = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.5)
SIZES = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, max_position_embeddings=300)


@pytest.fixture
def ministral(device):
    """(module, geometry), whose queries are scaled from position 8 on."""
    module = tiny_model("ministral3", attn_implementation=ATTENTION_NAME, rope_parameters=ROPE, **SIZES)
    geometry = probe_geometry(module.requires_grad_(False))
    fuse_projections(module)
    return module.to(device), geometry


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_scaled_queries_are_fused(ministral, deterministic):
    assert decoder_trial.unsupported_reason(*ministral, deterministic=deterministic) is None


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_a_lost_scale_is_seen_near_and_far(ministral, monkeypatch, first):
    module, geometry = ministral
    parts = decoder_parts.parts_of(module, geometry, 300)
    factors = parts.query_factors.clone()
    assert factors[:8].unique().tolist() == [1.0] and factors[8:300].min() > 1.3
    factors[first:] = 1.0
    monkeypatch.setattr(model, "parts_of", lambda *_: parts._replace(query_factors=factors))
    reason = decoder_trial.unsupported_reason(module, geometry, deterministic=False)
    assert reason.is_failure and "differ from its modules'" in reason.text


def test_plain_queries_have_no_factors(device):
    module = tiny_model("llama", **SIZES).requires_grad_(False)
    geometry = probe_geometry(module)
    fuse_projections(module)
    assert decoder_parts.parts_of(module, geometry, 32).query_factors is None
