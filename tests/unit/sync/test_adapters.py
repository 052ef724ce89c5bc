"""A model with adapters is sent as its base model with the adapters merged; the trainer's weights stay as they are."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sync
from rollout_engine.testing import tiny_model
from sync.errors import ManifestMismatch
from sync.lazy_tensor import materialized
from sync.source import read_source

ADAPTED = runpy.run_path(str(Path(__file__).parent / "adapted.py"))
build, merged = ADAPTED["build"], ADAPTED["merged"]


def sent(source):
    return {name: materialized(tensor) for name, tensor in read_source(source)}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_adapters_are_merged_and_trained_copies_take_the_place_of_what_they_replace():
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_equal(sent(model), merged(model))
    assert_equal(model.state_dict(), before)
    assert not model.layer.merged and all(p.requires_grad for p in model.parameters())


def test_the_adapters_that_are_active_are_merged():
    model = build()
    model.layer.active_adapters = ["other", "default"]
    assert_equal(sent(model), merged(model, ["other", "default"]))
    model.layer.active_adapters = ["other"]
    assert_equal(sent(model), merged(model, ["other"]))


def test_what_the_trainer_has_merged_is_sent_as_it_is():
    model = build()
    expected = merged(model)
    model.layer.merge()
    found = dict(read_source(model))
    assert found["layers.1.weight"].data_ptr() == model.layer.base_layer.weight.data_ptr()
    assert_equal(found, expected)


@pytest.mark.parametrize("is_merged", [False, True])
def test_adapters_that_are_disabled_are_left_out(is_merged):
    model = build()
    expected = merged(model, []) | {"embed.weight": model.base_model.model.embed.original_module.weight}
    if is_merged:
        model.layer.merge()
    model.layer.disable_adapters = model.base_model.model.embed.disable_adapters = True
    found = sent(model)
    torch.testing.assert_close(found.pop("layers.1.weight"), expected.pop("layers.1.weight"))
    assert_equal(found, expected)


@pytest.mark.parametrize("transport", ["store", "shm", "inproc"])
def test_every_transport_takes_them(tmp_path, transport):
    model = build()
    options = {} if transport == "inproc" else {"directory": tmp_path / "meeting", "num_threads": 2}
    sender = sync.make_sender(transport, **options)
    manifest = sender.offer(model, 1, {"layers.1.weight": ("bfloat16", (4, 4))})
    receiver = sync.make_receiver(transport, **(options or {"sender": sender}))
    found = {name: tensor.clone() for name, tensor in receiver.receive(manifest)}
    sender.close()
    expected = merged(model)
    assert_equal(found, expected | {"layers.1.weight": expected["layers.1.weight"].bfloat16()})


def test_it_is_said_once_for_each_model(caplog):
    models = [build(), build()]
    for model in (*models, *models):
        read_source(model)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "active adapters (PEFT) are merged into the weights that are sent" in caplog.text
    assert "merge_adapter()" in caplog.text


def test_a_prompt_cannot_be_merged():
    model = build()
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True, peft_type="PROMPT_TUNING")}
    with pytest.raises(ManifestMismatch, match=r"Adapter 'default' \(PROMPT_TUNING\) trains a prompt"):
        read_source(model)


def test_a_state_dict_with_adapters_is_refused_with_what_to_pass():
    with pytest.raises(ManifestMismatch, match=r"'embed\.original_module.* pass the model itself"):
        read_source(build().state_dict())


def test_a_merge_that_fails_names_the_layer():
    model = build()
    model.layer.lora_A["default"] = nn.Linear(9, 2)
    with pytest.raises(ManifestMismatch, match=r"adapters of 'base_model\.model\.layers\.1' cannot be merged"):
        sent(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}])
def test_the_bits_are_those_of_pefts_own_merge(options, dtype):
    peft = pytest.importorskip("peft")
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    config = peft.LoraConfig(**options)
    model = peft.get_peft_model(tiny_model("qwen2", seed=3).to(dtype), config)
    assert_equal(sent(model), copy.deepcopy(model).merge_and_unload().state_dict())
