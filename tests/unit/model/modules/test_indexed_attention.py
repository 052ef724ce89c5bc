"""Indexers are recognised by what they compute; others are refused by name."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.admission.gate import admit, build_module
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.indexed_attention import find_rotation, has_indexers, index_attention, indexer_reason
from rollout_engine.model.modules.latent_attention import cache_latents
from rollout_engine.testing import tiny_config
from rollout_engine.testing.architectures import INDEXED_SIZES

pytestmark = pytest.mark.skipif(not INDEXED_SIZES.keys() <= set(CONFIG_MAPPING), reason="a release without these types")


def build(architecture):
    with torch.device("cpu"):
        sizes = INDEXED_SIZES[architecture]
        module = build_module(tiny_config(architecture, **sizes), torch.float32, ATTENTION_NAME)
    cache_latents(module)
    index_attention(module)
    return module


def test_layers_with_an_indexer_cache_its_keys_and_others_read_its_choice():
    module = build("glm_moe_dsa")
    names = [name for name, _ in module.named_parameters() if "indexer" in name]
    assert has_indexers(module) and any("layers.0." in name for name in names) and len(names) == 2 * 5
    geometry = probe_geometry(module)
    assert [(layer.index_topk, layer.index_dim) for layer in geometry] == [(24, 16), (24, 0), (24, 16)]
    assert [layer.cached_per_token for layer in geometry] == [24 + 16, 24, 24 + 16]


@pytest.mark.parametrize(("architecture", "rotation"), [("deepseek_v32", "halves"), ("glm_moe_dsa", "pairs")])
def test_rotations_are_found_by_a_trial(architecture, rotation):
    indexer = build(architecture).model.layers[0].self_attn.indexer
    indexer.__class__ = type(indexer).__mro__[2]
    assert find_rotation(indexer) == rotation and indexer_reason(indexer) is None


def test_an_indexer_that_computes_something_else_is_refused_by_name():
    module = build_module(tiny_config("deepseek_v32", **INDEXED_SIZES["deepseek_v32"]), torch.float32, ATTENTION_NAME)

    class Squared(type(module.model.layers[0].self_attn.indexer)):
        def forward(
            self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values=None
        ):
            rest = position_embeddings, attention_mask, position_ids, past_key_values
            return super().forward(hidden_states * hidden_states, q_resid, *rest)

    for layer in module.model.layers:
        layer.self_attn.indexer.__class__ = Squared
    cache_latents(module)
    index_attention(module)
    with pytest.raises(ConfigError, match="chooses positions in a way that is not served here: Squared multiplies"):
        admit(module)


def test_an_indexer_over_pools_of_keys_is_refused_by_what_it_takes():
    class Pooled(torch.nn.Module):
        def forward(self, hidden_states, q_resid, attention_mask, past_key_values):
            return hidden_states

    assert "Pooled takes hidden_states, q_resid, attention_mask, past_key_values, and" in indexer_reason(Pooled())
