"""Headers of GGUF files become the files that transformers reads; damaged and unknown ones are refused."""

import json
import os
import random

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.config import config_of
from rollout_engine.base.gguf.header import GgufHeader
from rollout_engine.base.locations import find_directory
from rollout_engine.testing import tiny_config, tiny_model
from rollout_engine.text.tokenizer import TextCodec
from sync.own_files import CACHE_VARIABLE
from tests.gguf_files import header_of, metadata_of, tensors_of, tokenizer_values, write_gguf

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<pad>", "<bos>", "<eos>", *BYTES, "ĠĠ", "12", "ab", "Ġab", "<think>"]
MERGES = ["Ġ Ġ", "1 2", "a b", "Ġ ab"]
TYPES = [3, 3, 3] + [1] * (len(TOKENS) - 4) + [4]
LLAMA = tensors_of(tiny_model("llama", vocab_size=len(TOKENS), tie_word_embeddings=True))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(path, architecture="llama", more=(), tensors=LLAMA, **tokenizer):
    metadata = metadata_of(tiny_config(architecture), TOKENS, merges=MERGES, types=TYPES, **tokenizer)
    return write_gguf(path, metadata | dict(more), tensors)


def tokenizer_of(path, **tokenizer):
    return AutoTokenizer.from_pretrained(find_directory(str(written(path, **tokenizer)), weights=False))


def test_a_file_and_its_directory_become_a_checkpoints_directory(tmp_path, cache):
    path = written(tmp_path / "model.gguf", eot_token_id=5)
    directory = find_directory(str(path), weights=True)
    assert directory == find_directory(str(tmp_path), weights=True) and cache in directory.parents
    assert os.path.realpath(directory / "model.gguf") == str(path)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["vocab_size"], config["num_key_value_heads"]) == (16, len(TOKENS), 2)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 5]
    os.utime(path, ns=(0, 0))
    assert find_directory(str(path), weights=True) != directory  # it may be another one now


def test_one_of_several_files_must_be_named(tmp_path):
    written(tmp_path / "a.gguf")
    written(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files: give the path of one, such as .*a\.gguf"):
        find_directory(str(tmp_path), weights=True)


def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="model.gguf cannot be opened: it is a named pipe"):
        find_directory(str(tmp_path / "model.gguf"), weights=True)


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"Set {CACHE_VARIABLE} to a directory"):
        find_directory(str(written(tmp_path / "model.gguf")), weights=True)


def test_every_cut_and_every_flipped_byte_of_a_header_is_read_or_refused_by_name(tmp_path):
    tokenizer = tokenizer_values(["a", "b", "c", "d"])
    whole = header_of({"general.architecture": "llama", "x": 1.5, **tokenizer}, {"t": ((4, 8), 0, 128)}) + bytes(128)
    path, rng, refused = tmp_path / "model.gguf", random.Random(0), 0
    for size in range(len(whole) - 128):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"model\.gguf is not a whole GGUF file: .* again\."):
            GgufHeader.read(path)
    for place in range(len(whole) - 128):
        damaged = bytearray(whole)
        damaged[place] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            config_of(GgufHeader.read(path))
        except ConfigError as problem:
            assert str(path) in str(problem)
            refused += 1
    assert refused == len(whole) - 128  # its metadata lacks a size


@pytest.mark.parametrize(
    "more,message",
    [
        ({"general.architecture": "mamba"}, "of the architecture 'mamba' are not served: expected one of llama,"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 may change the logits, and is not read"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope.scaling.type='yarn' is not served"),
        ({"llama.rope.dimension_count": 8}, "of llama differ, which is not served"),
        ({"llama.block_count": 1 << 30}, "contradict each other or its 2 layers: 1073741824 layers"),
        ({"llama.embedding_length": 1 << 30}, r"by its metadata token_embd.weight has shape \[264, 1073741824\]"),
        ({"llama.attention.head_count_kv": 3}, r"by its metadata blk.0.attn_k.weight has shape \[48, 64\]"),
        ({"llama.block_count": "two"}, r"llama.block_count='two' is of another type: expected int"),
        ({"split.count": 3}, "is one of several files: merge them"),
    ],
)
def test_metadata_that_is_not_known_is_refused(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        find_directory(str(written(tmp_path / "model.gguf", more=more)), weights=True)


def test_metadata_and_tensors_that_are_missing_are_named(tmp_path):
    metadata = metadata_of(tiny_config("llama"))
    for name in ("token_embd.weight", "blk.0.ffn_down.weight"):
        lacking = {key: values for key, values in LLAMA.items() if key != name}
        with pytest.raises(ConfigError, match=rf"b\.gguf: by its metadata {name} has shape \[\d+, \d+\]; found none"):
            find_directory(str(write_gguf(tmp_path / "b.gguf", metadata, lacking)), weights=True)
    del metadata["llama.block_count"]
    with pytest.raises(ConfigError, match="has no llama.block_count, without which"):
        find_directory(str(write_gguf(tmp_path / "a.gguf", metadata, LLAMA)), weights=True)


def test_the_rotary_factors_of_llama_3_become_its_parameters_and_others_are_refused(tmp_path):
    scaling = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    config = tiny_config("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy()
    path = write_gguf(tmp_path / "a.gguf", metadata_of(config), LLAMA | {"rope_freqs.weight": factors})
    found = config_of(GgufHeader.read(path))["rope_parameters"]
    assert found == {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    path = write_gguf(tmp_path / "b.gguf", metadata_of(config), LLAMA | {"rope_freqs.weight": factors**2})
    with pytest.raises(ConfigError, match="rope_freqs.weight is not that of a Llama 3"):
        config_of(GgufHeader.read(path))


def test_smollm_divides_digits_and_then_as_gpt_2(tmp_path):
    texts = {"gpt-2": ["ab", "12", "Ġ", "Ġ", "1"], "smollm": ["ab", "1", "2", "ĠĠ", "1"]}
    for division, tokens in texts.items():
        tokenizer = tokenizer_of(tmp_path / f"{division}.gguf", pre=division)
        assert tokenizer.tokenize("ab12  1") == tokens
        assert tokenizer.decode(tokenizer("ab12  1").input_ids) == "ab12  1"


def test_qwen2_divides_as_its_own_tokenizer(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model.gguf", pre="qwen2")
    vocabulary = {token: i for i, token in enumerate(TOKENS[:-1])}
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in MERGES])
    for text in ("ab12  12\n\n ab's", "e\u0301 \u00e9ab", "  ab   12", "\tab!?\r\n12 12", "x<think>ab"):
        if "<think>" not in text:
            assert tokenizer(text).input_ids == theirs(text, add_special_tokens=False).input_ids
    assert tokenizer.tokenize("x<think>ab<eos>") == ["x", "<think>", "ab", "<eos>"]
    assert (
        tokenizer.all_special_tokens == ["<bos>", "<eos>"] and tokenizer.decode([TOKENS.index("<think>")]) == "<think>"
    )


def test_llama_3_takes_three_digits_and_begins_texts(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "a.gguf", pre="llama-bpe")
    assert tokenizer.convert_ids_to_tokens(tokenizer("1212 ab").input_ids) == ["<bos>", "12", "1", "2", "Ġab"]
    tokenizer = tokenizer_of(tmp_path / "b.gguf", pre="llama-bpe", add_bos_token=False, add_eos_token=True)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["ab", "<eos>"]


def test_the_chat_template_and_special_tokens_come_with_the_file(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    path = written(tmp_path / "model.gguf", more={"tokenizer.chat_template": template})
    codec = TextCodec.from_pretrained(str(path))
    assert codec.hf.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<eos>"
    assert (codec.hf.bos_token, codec.hf.eos_token) == ("<bos>", "<eos>") and codec.hf.name_or_path == str(path)


@pytest.mark.parametrize(
    "fields", [{"pre": "tekken"}, {"model": "llama"}, {"add_space_prefix": True}, {"eos_token_id": 999}]
)
def test_a_tokenizer_that_cannot_be_made_as_it_was_is_asked_for(tmp_path, caplog, fields):
    path = written(tmp_path / "model.gguf", **fields)
    assert not (find_directory(str(path), weights=True) / "tokenizer.json").exists()
    assert "Give tokenizer= with the original one" in caplog.text
    with pytest.raises(ConfigError, match="No tokenizer could be loaded from '.*model.gguf'"):
        TextCodec.from_pretrained(str(path))
