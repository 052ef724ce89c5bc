"""Weights of GGUF files are those of the model that was converted, to the bit; damaged files are refused by name."""

import sys

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.gguf_weights import read_gguf
from rollout_engine.model.loading.loader import load_model
from rollout_engine.testing import tiny_checkpoint, tiny_model
from sync.own_files import CACHE_VARIABLE
from tests.caches import cache_without
from tests.gguf_files import metadata_of, quantised, tensors_of, write_gguf

gguf = pytest.importorskip("gguf")

FIELDS = {
    "llama": dict(attention_bias=True),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=32),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(cache_without("gguf", tmp_path / "cache")))


@pytest.fixture
def model():
    return tiny_model("llama")


def written(path, model):
    return write_gguf(path, metadata_of(model.config), tensors_of(model))


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", FIELDS)
def test_every_weight_and_sample_is_that_of_the_model_that_was_converted(tmp_path, architecture):
    model = tiny_model(architecture, **FIELDS[architecture])
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", architecture, **FIELDS[architecture])
    path = written(tmp_path / "model.gguf", model)
    loaded = load_model(EngineConfig(model=str(path)))
    weights = model.state_dict()
    for name, weight in loaded.module.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert loaded.dtype == torch.float32 and loaded.eos_token_ids == [2]
    results = []
    for directory in (checkpoint, path):
        with LLM(directory, skip_tokenizer_init=True, num_kv_blocks=64, log_stats=False) as llm:
            [out] = llm.generate([[5, 6, 7, 8, 9]], GREEDY, use_tqdm=False)
            results.append((out.outputs[0].token_ids, out.outputs[0].logprobs.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_rows_are_dequantised_alike_by_every_part_that_is_asked_for(tmp_path, model, kind):
    stored = quantised(tensors_of(model), kind)
    entries = {
        entry.name: entry for entry in read_gguf(write_gguf(tmp_path / "m.gguf", metadata_of(model.config), stored))
    }
    for name, theirs in (
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        form, shape, content = stored[theirs]
        raw = np.frombuffer(content, np.uint8).reshape(shape[0], -1)
        expected = gguf.quants.dequantize(raw, form).astype(np.float32).tobytes()
        assert entries[name].materialize().numpy().tobytes() == expected
        for start, size in ((0, 4), (64 * 4 - 8, 100 * 4), (len(expected) - 12, 12)):
            out = bytearray(size)
            entries[name].fetch(memoryview(out), start)
            assert bytes(out) == expected[start : start + size]


def test_a_narrower_dtype_has_the_same_values_rounded_once(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", metadata_of(model.config), quantised(tensors_of(model), "Q4_0"))
    whole = load_model(EngineConfig(model=str(path))).module.state_dict()
    narrow = load_model(EngineConfig(model=str(path), dtype="bfloat16")).module.state_dict()
    assert all(torch.equal(narrow[name], weight.to(torch.bfloat16)) for name, weight in whole.items())


def test_a_log_line_names_the_formats(tmp_path, model, caplog):
    path = write_gguf(tmp_path / "m.gguf", metadata_of(model.config), quantised(tensors_of(model), "Q8_0"))
    with caplog.at_level("INFO"):
        read_gguf(path)
    assert f"{path} is dequantised once, as it is loaded, to float32" in caplog.text
    assert "16 tensors in Q8_0, 5 tensors in F32" in caplog.text


def test_a_cut_file_is_refused_by_name_wherever_it_is_cut(tmp_path, model):
    path = written(tmp_path / "m.gguf", model)
    whole = path.read_bytes()
    for size in (len(whole) - 33, len(whole) // 2, 3000):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"m\.gguf is not a whole GGUF file: "):
            LLM(path, skip_tokenizer_init=True)


def test_a_format_that_is_not_read_is_refused(tmp_path, model):
    tensors = tensors_of(model)
    shape = tensors["output.weight"].shape
    for kind in (250, int(gguf.GGMLQuantizationType.I8)):
        path = write_gguf(
            tmp_path / "m.gguf", metadata_of(model.config), tensors | {"output.weight": (kind, shape, bytes(99999))}
        )
        with pytest.raises(ConfigError, match=f"output.weight has the format {kind}, which gguf .* does not read"):
            read_gguf(path)


def test_tensors_that_the_model_lacks_and_lacking_ones_are_refused(tmp_path, model):
    tensors = tensors_of(model)
    path = write_gguf(tmp_path / "m.gguf", metadata_of(model.config), tensors | {"blk.0.strange.weight": np.zeros(4)})
    with pytest.raises(ConfigError, match=r"not in the model: blk\.0\.strange\.weight"):
        load_model(EngineConfig(model=str(path)))
    del tensors["blk.1.attn_k.weight"]
    path = write_gguf(tmp_path / "m.gguf", metadata_of(model.config), tensors)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(EngineConfig(model=str(path)))


def test_without_the_package_the_error_says_what_to_install(tmp_path, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"m\.gguf: .* pip install 'rollout-engine\[gguf\]'"):
        load_model(EngineConfig(model=str(written(tmp_path / "m.gguf", model))))
