"""Adapters in PEFT's format: what is read, and what is refused by its name."""

import json
import math
import os

import pytest
import torch

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.model.adapters.peft_format import read_adapter
from rollout_engine.model.cpu.adapters import CpuAdapterPool
from rollout_engine.testing import random_adapter, save_adapter, tiny_model

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter():
    return random_adapter(tiny_model(), targets=["q_proj", "down_proj"])


def _with(adapter, **config):
    return LoRARequest("x", tensors=adapter.tensors, config={**adapter.config, **config})


def test_files_hold_what_memory_holds(adapter, tmp_path):
    saved = save_adapter(tmp_path, adapter)
    ours, theirs = read_adapter(adapter), read_adapter(saved)
    assert ours.keys() == theirs.keys() and len(ours) == 4
    assert all(torch.equal(ours[name].a, theirs[name].a) for name in ours)
    assert all(torch.equal(ours[name].b, theirs[name].b) for name in ours)
    assert ours[Q].scale == theirs[Q].scale == 2.0


def test_names_may_tell_the_adapter_and_lack_pefts_prefix(adapter):
    tensors = {name.replace(".weight", ".default.weight"): each for name, each in adapter.tensors.items()}
    plain = {name.removeprefix("base_model.model."): each for name, each in adapter.tensors.items()}
    for given in (tensors, plain):
        assert (
            read_adapter(LoRARequest("x", tensors=given, config=adapter.config)).keys() == read_adapter(adapter).keys()
        )


def test_scales_are_those_of_peft(adapter):
    assert read_adapter(_with(adapter, use_rslora=True))[Q].scale == 16 / math.sqrt(8)
    scales = read_adapter(_with(adapter, alpha_pattern={"q_proj": 4, "layers.1.mlp.down_proj": 32}))
    assert scales[Q].scale == 0.5
    assert scales["model.layers.0.mlp.down_proj"].scale == 2.0
    assert scales["model.layers.1.mlp.down_proj"].scale == 4.0


def test_a_rank_pattern_is_followed(adapter):
    tensors = {
        name: each if "q_proj" not in name else (each[:4] if "lora_A" in name else each[:, :4])
        for name, each in adapter.tensors.items()
    }
    config = {**adapter.config, "rank_pattern": {"q_proj": 4}}
    assert read_adapter(LoRARequest("x", tensors=tensors, config=config))[Q].scale == 4.0
    with pytest.raises(RequestError, match=r"config.r=8 .* must be 4, the rank of the tensors of '.*q_proj'"):
        read_adapter(LoRARequest("x", tensors=tensors, config=adapter.config))


@pytest.mark.parametrize(
    "option, value",
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["w"]),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1]),
        *(
            ("init_lora_weights", start)
            for start in ("pissa_niter_4", "olora", "CorDA", "loftq", "lora_ga", "a new one")
        ),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 4}),
        ("peft_type", "IA3"),
        ("lora_alpha", None),
        ("lora_alpha", math.inf),
        ("rank_pattern", [3]),
        ("alpha_pattern", {"(": 3}),
        ("r", 4),
        ("use_rslora", "no"),
        (r"rank_pattern\['q_proj'\]", {"q_proj": 4}),
        (r"alpha_pattern\['down_proj'\]", {"down_proj": "x"}),
    ],
)
def test_options_that_are_not_served_are_named(adapter, option, value):
    with pytest.raises(RequestError, match=rf"config\.{option}"):
        read_adapter(_with(adapter, **{option.partition("\\")[0]: value}))


@pytest.mark.parametrize("start", [None, True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_alone_are_served(adapter, start):
    assert read_adapter(_with(adapter, init_lora_weights=start)).keys() == read_adapter(adapter).keys()


@pytest.mark.parametrize(
    "file, reason",
    [("adapter_config.json", "it is a named pipe, not a regular file"), ("adapter_model.safetensors", "a named pipe")],
)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(adapter, tmp_path, file, reason):
    saved = save_adapter(tmp_path, adapter)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)
    with pytest.raises(RequestError, match=f"{file} .*{reason}"):
        read_adapter(saved)


def test_files_beyond_all_measure_are_refused(adapter, tmp_path):
    saved = save_adapter(tmp_path, adapter)
    os.truncate(tmp_path / "adapter_config.json", 1 << 40)
    with pytest.raises(RequestError, match="it has more than 1048576 bytes"):
        read_adapter(saved)
    save_adapter(tmp_path, adapter)
    header = json.dumps({f"{Q}.lora_A.weight": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}})
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(path, 8 + len(header) + (1 << 40))
    with pytest.raises(RequestError, match="takes 1099511627776 bytes, more than this process can have"):
        read_adapter(saved)


@pytest.mark.slow
def test_patterns_that_take_too_long_are_refused(adapter):
    slow = "(a|.*b)*" * 100
    patterns = {f"{slow}{number}": 8 for number in range(1000)}
    with pytest.raises(RequestError, match=r"config\.rank_pattern=.* it takes too long to match"):
        read_adapter(_with(adapter, rank_pattern=patterns))
    assert read_adapter(_with(adapter, rank_pattern={slow: 8})).keys() == read_adapter(adapter).keys()


def test_errors_say_which_adapter_they_refuse(adapter, tmp_path):
    pool = CpuAdapterPool(tiny_model(), max_loras=1, max_rank=8)
    saved = save_adapter(tmp_path, adapter, use_dora=True)
    with pytest.raises(RequestError, match=rf"use_dora=True .* That was adapter 'adapter' from {tmp_path}\."):
        pool.prepare_adapter(saved)
    with pytest.raises(RequestError, match=r"r=4 .* That was adapter 'x' from memory\.") as caught:
        pool.prepare_adapter(_with(adapter, r=4))
    assert caught.value.field == "config.r"
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError) as caught:
        pool.prepare_adapter(saved)
    assert str(caught.value).count(str(tmp_path)) == 2  # of the file, in our words and in those of its reader


def _changed(adapter, **changes):
    tensors = {**adapter.tensors, **{f"base_model.model.{Q}.{name}": each for name, each in changes.items()}}
    return LoRARequest("x", tensors={k: v for k, v in tensors.items() if v is not None}, config=adapter.config)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"lora_magnitude_vector.weight": torch.ones(64)}, "lora_magnitude_vector"),
        ({"bias": torch.ones(64)}, r"q_proj\.bias"),
        ({"base_layer.weight": torch.ones(64, 64)}, r"adapts an embedding or the head, so merge it"),
        ({"lora_A.weight": None}, "given with its lora_A too"),
        ({"lora_B.weight": torch.zeros(64, 3)}, r"lora_B \[64, 3\]"),
        ({"lora_B.weight": torch.zeros(64, 8, dtype=torch.int64)}, "a tensor of floats"),
        ({"lora_B.weight": [[1.0]]}, "a tensor of floats"),
    ],
)
def test_tensors_that_are_not_served_are_named(adapter, changes, match):
    with pytest.raises(RequestError, match=match):
        read_adapter(_changed(adapter, **changes))


def test_no_values_and_tensors_without_a_config_are_refused(adapter):
    with pytest.raises(RequestError, match="path=None .* no values of 'x'"):
        read_adapter(LoRARequest("x"))
    with pytest.raises(RequestError, match="config=None .* given with tensors"):
        read_adapter(LoRARequest("x", tensors=adapter.tensors))
    with pytest.raises(RequestError, match="at least one pair"):
        read_adapter(LoRARequest("x", tensors={}, config=adapter.config))


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    "file, spoil, match",
    [
        ("adapter_model.safetensors", _cut, "cut short"),
        ("adapter_model.safetensors", lambda path: path.write_bytes(b"abc"), "not a safetensors file"),
        ("adapter_model.safetensors", lambda path: path.unlink(), "cannot be read"),
        ("adapter_model.safetensors", lambda path: path.rename(path.with_name("adapter_model.bin")), "pickles"),
        ("adapter_config.json", lambda path: path.write_text("{"), "is no configuration"),
        ("adapter_config.json", lambda path: path.write_text("[1]"), "is no configuration"),
        ("adapter_config.json", lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(adapter, tmp_path, file, spoil, match):
    saved = save_adapter(tmp_path, adapter)
    spoil(tmp_path / file)
    with pytest.raises(RequestError, match=match) as caught:
        read_adapter(saved)
    assert file in str(caught.value) and caught.value.field == "path"


def test_a_directory_given_as_a_name_is_told_where_it_belongs():
    with pytest.raises(RequestError, match=r"give LoRARequest\('NAME', path='adapters/math'\)"):
        read_adapter(LoRARequest("adapters/math"))
