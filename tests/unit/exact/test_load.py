"""`exact.load`: a trainer with the weights of an engine of the same checkpoint, quantised or not."""

import importlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import ConfigError, WeightUpdateError
from rollout_engine.testing import tiny_checkpoint
from tests.integration.composites import composite, save
from tests.quantised_files import quantise_checkpoint


@pytest.fixture
def quantised(tmp_path):
    quantise_checkpoint(tiny_checkpoint(tmp_path / "plain"), tmp_path / "quantised", "fp8-blocks")
    return tmp_path / "quantised"


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rollout_and_its_trainer_agree_to_the_bit(quantised, dtype):
    trainer = exact.load(quantised, getattr(torch, dtype))
    assert all(parameter.requires_grad and parameter.dtype == trainer.dtype for parameter in trainer.parameters())
    with RolloutPolicy.from_pretrained(str(quantised), dtype=dtype, log_stats=False) as policy:
        batch = policy.rollout(["hello", "to whom"], SamplingParams(max_tokens=12, ignore_eos=True, seed=1))
        report = exact.check(batch, exact.token_logprobs(trainer, batch))
    assert report.is_exact and report.num_tokens == 24, report


def test_what_it_saves_is_a_plain_checkpoint_of_the_same_weights(quantised, tmp_path):
    trainer = exact.load(quantised)
    trainer.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=trainer.dtype)
    assert not hasattr(saved.config, "quantization_config")
    expected = trainer.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.state_dict().items())
    assert saved.generation_config.eos_token_id == 2


def test_an_update_from_a_quantised_directory_gives_its_weights(quantised, tmp_path, caplog):
    caplog.set_level("INFO", "sync")
    other = tiny_checkpoint(tmp_path / "other", seed=5)
    with LLM(str(other), dtype="bfloat16", log_stats=False) as llm:
        report = llm.update_weights(str(quantised))
        assert report.digest == llm.update_weights(str(tmp_path / "plain")).digest
        assert "dequantised in float32" in caplog.text


def test_an_update_without_its_scales_is_refused(quantised, tmp_path):
    path = quantised / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if not n.endswith("0.mlp.up_proj.weight_scale_inv")}, path)
    with (
        LLM(str(tiny_checkpoint(tmp_path / "other")), log_stats=False) as llm,
        pytest.raises(WeightUpdateError, match=r"0\.mlp\.up_proj\.weight' is F8_E4M3, and there is no scale"),
    ):
        llm.update_weights(str(quantised))


def test_dtypes_that_cannot_be_exact_are_refused(quantised):
    with pytest.raises(ConfigError, match=r"dtype=torch\.float16 is not allowed"):
        exact.load(quantised, torch.float16)


def test_a_head_that_classifies_is_refused(tmp_path):
    tiny_checkpoint(tmp_path, head="sequence")
    with pytest.raises(ConfigError, match="classifies each sequence"):
        exact.load(tmp_path)


def test_a_composite_whose_experts_are_stacked_is_loaded_as_its_engine_does(tmp_path):
    model = composite("glm4v_moe")
    save(model, tmp_path)
    found, expected = exact.load(tmp_path).get_decoder().state_dict(), model.get_decoder().state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("dtype", "name"),
    {"bf16": "bfloat16", "torch.float32": "float32", torch.bfloat16: "bfloat16", None: "auto", "auto": "auto"}.items(),
)
def test_a_dtype_is_one_of_torch_or_a_name_that_engines_take(dtype, name, monkeypatch):
    given, load_module = [], importlib.import_module("rollout_engine.exact.load")
    monkeypatch.setattr(load_module, "load_trainable", lambda path, dtype, device: given.append(dtype))
    monkeypatch.setattr(load_module, "enable", lambda model, fp32_head: None)
    exact.load("path", dtype=dtype)
    assert given == [name]


@pytest.mark.parametrize("dtype", ["float16", torch.float16, "int8", 32])
def test_another_dtype_is_refused_with_those_that_are_exact(dtype):
    with pytest.raises(ConfigError, match='must be float32 or bfloat16 .*"auto" or None'):
        exact.load("path", dtype=dtype)
