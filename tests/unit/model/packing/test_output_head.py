"""A float32 head goes along with copies of its model; where logits cannot be float32, that is said in a sentence."""

import copy

import pytest
import torch
from torch import nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu import build
from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.packing.output_head import has_float32_head, set_float32_head
from rollout_engine.testing import tiny_model

needs_compiler = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler here")


@pytest.fixture
def model():
    module = tiny_model("llama", dtype=torch.bfloat16)
    make_row_invariant(module)
    return module


def test_without_the_kernels_it_is_refused(model, monkeypatch):
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    with pytest.raises(ConfigError, match="fp32_head=True needs the C\\+\\+ kernels.*install g\\+\\+"):
        set_float32_head(model, True)


def test_a_head_that_was_not_replaced_is_refused():
    with pytest.raises(ConfigError, match="the output head of LlamaForCausalLM was not replaced by RowInvariantLinear"):
        set_float32_head(tiny_model("llama"), True)


def test_a_model_elsewhere_is_refused(model):
    with pytest.raises(ConfigError, match="works on a CPU only, and the model is on meta"):
        set_float32_head(model.to("meta"), True)


@needs_compiler
def test_it_goes_along_with_copies_wrappers_and_repeated_swaps_and_can_be_taken_back(model):
    set_float32_head(model, True)
    make_row_invariant(model)
    assert has_float32_head(model) and has_float32_head(copy.deepcopy(model)) and has_float32_head(nn.Sequential(model))
    assert copy.deepcopy(model)(torch.tensor([[1, 2]])).logits.dtype == torch.float32
    set_float32_head(model, False)
    assert model(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
