"""Towers whose files have other names than their modules, and tensors of several weights."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_engine import LLM, ConfigError, exact
from rollout_engine.testing.tiny_pictures import tiny_vision_checkpoint, tiny_vision_model

pytestmark = pytest.mark.slow
FUSED = "vision_tower.encoder.blocks.1.wqkv.weight"


@pytest.fixture
def published(tmp_path):
    """A checkpoint of Kimi K2.5 with the names that published ones have."""
    path = tiny_vision_checkpoint(tmp_path, "kimi_k25")
    file = path / "model.safetensors"
    tensors = {
        name.replace("encoder.patch_embed", "patch_embed").replace("model.mm_projector", "mm_projector"): tensor
        for name, tensor in load_file(file).items()
    }
    assert {FUSED, "vision_tower.patch_embed.proj.weight", "mm_projector.pre_norm.weight"} <= tensors.keys()
    assert tensors[FUSED].shape == (96, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_published_weights_are_read_as_transformers_reads_them(published):
    wanted = tiny_vision_model("kimi_k25").state_dict()
    found = exact.load(published, dtype="float32").state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_directory_updates_the_tower(published, tmp_path):
    with LLM(published, dtype="float32", num_kv_blocks=32, max_model_len=128, log_stats=False) as llm:
        (before,) = llm.collective_rpc("get_weight_digest")
        llm.update_weights(tiny_vision_model("kimi_k25", seed=1))
        assert llm.collective_rpc("get_weight_digest") != [before]
        llm.update_weights(published)
        assert llm.collective_rpc("get_weight_digest") == [before]


def test_a_tensor_that_is_missing_or_of_another_size_is_named(published):
    file = published / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {FUSED: tensors[FUSED][:64].contiguous()}, file)
    with pytest.raises(ConfigError, match="wqkv"):
        exact.load(published, dtype="float32")
    del tensors[FUSED]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="missing: .*layers.1.attn.q_proj.weight"):
        exact.load(published, dtype="float32")
