import copy
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.checkpoint import read_entries
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.testing import tiny_checkpoint, tiny_config, tiny_model
from sync.checkpoint_names import CheckpointNames

MOE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def changed(entry, **changes):
    other = copy.copy(entry)
    vars(other).update(changes)
    return other


def empty_table(architecture: str, **overrides) -> tuple[torch.nn.Module, WeightTable]:
    module = construct(tiny_config(architecture, **overrides), dtype=torch.float32, attention="eager")
    fuse_projections(module)
    return module, WeightTable.of(module)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_names_are_the_modules_and_views_are_its_storage(architecture):
    module, table = empty_table(architecture)
    state = module.state_dict()
    assert table.views.keys() == state.keys() == table.owners.keys()
    assert all(table.views[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())


@pytest.mark.parametrize(
    ("architecture", "overrides", "checkpoint_name"),
    [
        ("gpt_neox", {}, "embed_out.weight"),
        ("mixtral", MOE, "model.layers.0.block_sparse_moe.experts.3.w3.weight"),
        ("qwen3_moe", MOE, "model.layers.1.mlp.experts.0.up_proj.weight"),
    ],
)
def test_checkpoint_names_are_views_of_the_modules_parameters(tmp_path, architecture, overrides, checkpoint_name):
    tiny_checkpoint(tmp_path, architecture, **overrides)
    module, table = empty_table(architecture, **overrides)
    assert checkpoint_name in table.views and checkpoint_name not in module.state_dict()
    table.load(read_entries(tmp_path))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_an_expert_that_is_missing_is_noticed(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3_moe", **MOE)
    entries = [e for e in read_entries(tmp_path) if "layers.1.mlp.experts.2.down_proj" not in e.name]
    _, table = empty_table("qwen3_moe", **MOE)
    with pytest.raises(ConfigError, match=r"missing: .*experts\.2\.down_proj"):
        table.load(entries)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 5000), lambda path: os.utime(path)])
def test_a_checkpoint_that_changes_before_all_is_read_is_refused(tmp_path, change):
    tiny_checkpoint(tmp_path, "qwen3")
    entries = read_entries(tmp_path)
    change(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors .* while it was read"):
        empty_table("qwen3")[1].load(entries)


def test_tied_names_are_aliases_and_have_one_owner():
    _, table = empty_table("qwen3", tie_word_embeddings=True)
    assert table.aliases() == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert table.owners["lm_head.weight"] == "model.embed_tokens.weight"
    assert empty_table("qwen3")[1].aliases() == []


def test_nothing_is_written_when_a_name_does_not_fit(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3")
    module, table = empty_table("qwen3")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    entries = read_entries(tmp_path)
    with pytest.raises(ConfigError, match=r"2 tensors not in the model: stray\.0 .*stray\.1"):
        table.load(entries + [changed(entries[0], name=f"stray.{i}") for i in range(2)])
    assert all(bool((view == 7.0).all()) for view in table.views.values())


def test_only_ten_offenders_are_listed(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3")
    entries = read_entries(tmp_path)
    strays = [changed(entries[0], name=f"stray.{i}") for i in range(13)]
    with pytest.raises(ConfigError, match=r"13 tensors not in the model: .*stray\.9 .* and 3 more"):
        empty_table("qwen3")[1].load(entries + strays)


def test_missing_names_are_listed(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3")
    entries = [e for e in read_entries(tmp_path) if e.name != "model.norm.weight"]
    with pytest.raises(ConfigError, match=r"1 tensor missing: model\.norm\.weight\."):
        empty_table("qwen3")[1].load(entries)


def test_another_shape_names_both_shapes(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=r"of another shape: lm_head\.weight: expected \[260, 64\].*has \[259, 64\]"):
        empty_table("qwen3", vocab_size=260)[1].load(read_entries(tmp_path))


@pytest.mark.parametrize(
    "dtype,stored", [("int64", "I64"), ("uint8", "U8"), ("float8_e4m3fn", "F8_E4M3"), ("bool", "BOOL")]
)
def test_only_plain_floats_become_floats(tmp_path, dtype, stored):
    tiny_checkpoint(tmp_path, "qwen3")
    other = {"dtype": getattr(torch, dtype), "stored_dtype": stored}
    entries = [changed(e, **other) if e.name == "lm_head.weight" else e for e in read_entries(tmp_path)]
    with pytest.raises(ConfigError, match=rf"lm_head\.weight: expected torch\.float32.*has {stored}"):
        empty_table("qwen3")[1].load(entries)


def test_names_to_ignore_may_be_there(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3")
    entries = read_entries(tmp_path)
    stray = changed(entries[0], name="model.layers.0.self_attn.rotary_emb.inv_freq")
    module, table = empty_table("qwen3")
    table.load([*entries, stray], CheckpointNames(unused=[r"rotary_emb\.inv_freq$"]))
    expected = tiny_model("qwen3").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
