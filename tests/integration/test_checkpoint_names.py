"""Checkpoints whose names are not the module's: what loads is also taken as an update, from a path and as tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_engine import LLM, ConfigError, ManifestMismatchError
from rollout_engine.testing import byte_tokenizer, tiny_model
from rollout_engine.testing.architectures import SIZES
from sync import publish

OPTIONS = dict(num_kv_blocks=32, max_model_len=64, log_stats=False, dtype="float32")


def without_prefix(prefix):
    return lambda tensors: {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}


def as_the_hubs_gpt2(tensors):
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 512, 512).tril() for i in range(2)}
    return without_prefix("transformer")(tensors) | masks


def with_(*names):
    return lambda tensors: tensors | {name: torch.ones(8) for name in names}


CHECKPOINTS = {
    "gpt2 of the hub": ("gpt2", SIZES["gpt2"] | dict(tie_word_embeddings=True), {}, as_the_hubs_gpt2),
    "an embedding model": ("qwen3", dict(tie_word_embeddings=True), {}, without_prefix("model")),
    "a mixture without prefix": ("qwen3_moe", SIZES["qwen3_moe"], {}, without_prefix("model")),
    "an old Llama": ("llama", {}, {}, with_("model.layers.0.self_attn.rotary_emb.inv_freq")),
    "an old one without prefix": (
        "llama",
        dict(tie_word_embeddings=True),
        {},
        lambda tensors: without_prefix("model")(with_("model.layers.1.self_attn.rotary_emb.inv_freq")(tensors)),
    ),
    "layers that only draft": (
        "deepseek_v3",
        SIZES["deepseek_v3"],
        dict(num_nextn_predict_layers=1),
        with_("model.layers.2.embed_tokens.weight", "model.layers.2.mlp.gate.weight"),
    ),
}


def save(directory, seed, architecture, sizes, config, edit):
    """A plain checkpoint, and the same under other names."""
    tiny_model(architecture, seed=seed, **sizes).save_pretrained(directory / "plain")
    byte_tokenizer().save_pretrained(directory / "plain")
    tensors = edit(load_file(directory / "plain" / "model.safetensors"))
    (directory / "named").mkdir()
    for file in (directory / "plain").iterdir():
        if file.suffix != ".safetensors":
            (directory / "named" / file.name).write_bytes(file.read_bytes())
    path = directory / "named" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file(tensors, directory / "named" / "model.safetensors", metadata={"format": "pt"})
    return directory / "named", tensors


def digest(llm):
    [found] = llm.collective_rpc("get_weight_digest")
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_it_loads_and_every_kind_of_source_updates_with_it(tmp_path, kind):
    (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
    old, _ = save(tmp_path / "old", 1, *CHECKPOINTS[kind])
    new, tensors = save(tmp_path / "new", 2, *CHECKPOINTS[kind])
    with LLM(tmp_path / "old" / "plain", **OPTIONS) as llm:
        loaded = digest(llm)
        llm.update_weights(str(tmp_path / "new" / "plain"))
        wanted = digest(llm)
    publish(tmp_path / "store", tensors, 9)
    with LLM(old, **OPTIONS) as llm:
        assert digest(llm) == loaded
        for source in (new, tensors, iter(tensors.items()), tmp_path / "store"):
            llm.update_weights(source)
            assert digest(llm) == wanted
            llm.update_weights(old)
            assert digest(llm) == loaded
            llm.update_weights(old, reset_version=True, version=0)


def test_names_that_no_rule_covers_are_refused_at_load_and_in_updates(tmp_path):
    edit = with_("model.layers.0.self_attn.q_proj.scale")
    path, tensors = save(tmp_path, 1, "llama", {}, {}, edit)
    with pytest.raises(ConfigError, match=r"1 tensor not in the model: .*q_proj\.scale"):
        LLM(path, **OPTIONS)
    with LLM(tmp_path / "plain", **OPTIONS) as llm, pytest.raises(ManifestMismatchError, match=r"q_proj\.scale"):
        llm.update_weights(tensors)


def test_a_weight_under_both_names_is_refused(tmp_path):
    path, tensors = save(tmp_path, 1, "llama", {}, {}, lambda t: t | {"norm.weight": t["model.norm.weight"] + 1})
    with pytest.raises(ConfigError, match=r"lists model\.norm\.weight more than once"):
        LLM(path, **OPTIONS)
    with LLM(tmp_path / "plain", **OPTIONS) as llm, pytest.raises(ManifestMismatchError, match="more than once"):
        llm.update_weights(tensors)
