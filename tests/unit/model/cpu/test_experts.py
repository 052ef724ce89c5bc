"""Experts and routers of ours compute what transformers does, and a token's bits are its own."""

import copy

import pytest
import torch
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from rollout_engine.model.cpu.experts import RowInvariantExperts, swap_router
from rollout_engine.model.cpu.row_invariance import make_row_invariant, unproven_parts
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.expert_patterns import router_pattern
from rollout_engine.model.packing.linear_groups import linear_groups, repack
from rollout_engine.testing import tiny_config, tiny_model

DTYPES = [torch.float32, torch.bfloat16]
SIZES = dict(num_experts=7, num_local_experts=7, num_experts_per_tok=3, moe_intermediate_size=40)
SIZES |= dict(n_routed_experts=4, zero_expert_num=3, expert_ffn_hidden_size=40)
MODELS = ["qwen3_moe", "mixtral"]
FORMS = [
    (Qwen3MoeExperts, "qwen3_moe"),
    (AriaExperts, "aria_text"),
    (Gemma4TextExperts, "gemma4_text"),
    (GptOssExperts, "gpt_oss"),
    (LongcatFlashExperts, "longcat_flash"),
]
"""Plain; with transposed matrices; with GELU; with transposed matrices, biases, and a gate that is clamped; with
experts that return their input."""


def module_of(cls, architecture, dtype=torch.float32, **overrides):
    module = cls(tiny_config(architecture, **(SIZES | overrides)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.2)
    return module.to(dtype).requires_grad_(False)


def run_eagerly(module):
    if hasattr(module, "config"):  # those of LongCat-Flash do nothing else
        module.config._experts_implementation = "eager"


def inputs(dtype=torch.float32, num_tokens=300):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, 64, generator=generator).to(dtype)
    index = torch.rand(num_tokens, 7, generator=generator).topk(3).indices
    return x, index, torch.rand(num_tokens, 3, generator=generator).to(dtype)


def swapped(module):
    make_row_invariant(module)
    assert isinstance(module, RowInvariantExperts)
    return module


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize(("cls", "architecture"), FORMS)
def test_experts_compute_what_transformers_does(cls, architecture, dtype, tolerance):
    theirs = module_of(cls, architecture, dtype, moe_num_experts=7)
    run_eagerly(theirs)
    ours = swapped(copy.deepcopy(theirs))
    x, index, weights = inputs(dtype)
    for scale in (1, 100):  # gates that are clamped, too
        got, wanted = ours(x * scale, index, weights), theirs(x * scale, index, weights)
        largest = wanted.abs().max()
        torch.testing.assert_close(got / largest, wanted / largest, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("cls", "architecture"), FORMS)
def test_gradients_are_those_of_transformers(cls, architecture):
    theirs = module_of(cls, architecture, moe_num_experts=7).requires_grad_(True)
    run_eagerly(theirs)
    ours = swapped(copy.deepcopy(theirs))
    found = []
    for module in (ours, theirs):
        x, index, weights = inputs()
        x, weights = (each.requires_grad_(True) for each in (x, weights))
        (module(x, index, weights) * torch.linspace(-1, 1, 64)).sum().backward()
        found.append([x.grad, weights.grad, *(parameter.grad for parameter in module.parameters())])
    for mine, wanted in zip(*found, strict=True):
        assert (mine - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.quick(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "architecture"), FORMS)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(cls, architecture, dtype, threads):
    experts = swapped(module_of(cls, architecture, dtype, moe_num_experts=7))
    router = module_of(Qwen3MoeTopKRouter, "qwen3_moe", dtype)
    swap_router(router, router_pattern(router))
    x, _, _ = inputs(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            whole = experts(x, *reversed(router(x)[1:]))
            for rows in (slice(0, 1), slice(13, 15), slice(40, 57), slice(100, 229)):
                part = experts(x[rows], *reversed(router(x[rows])[1:]))
                assert torch.equal(part, whole[rows])
            shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
            assert torch.equal(experts(x[shuffled], *reversed(router(x[shuffled])[1:])), whole[shuffled])
    finally:
        torch.set_num_threads(before)


def test_no_tokens_are_an_empty_result():
    experts = swapped(module_of(Qwen3MoeExperts, "qwen3_moe"))
    with torch.no_grad():
        assert experts(*inputs(num_tokens=0)).shape == (0, 64)


@pytest.mark.parametrize("architecture", MODELS)
def test_nothing_of_a_mixture_stays_unproven_and_names_stay(architecture):
    model = tiny_model(architecture, **SIZES)
    model.set_attn_implementation(ATTENTION_NAME)
    names = list(model.state_dict())
    make_row_invariant(model)
    make_row_invariant(model)
    assert unproven_parts(model) == []
    assert list(model.state_dict()) == names


def test_writes_to_an_experts_weights_reach_its_products():
    model = tiny_model("qwen3_moe", **SIZES)
    make_row_invariant(model)
    ids = torch.randint(3, 259, (1, 9))
    with torch.no_grad():
        before = model(ids).logits
        for parameter in model.model.layers[0].mlp.parameters():
            parameter.data.mul_(1.5)
        repack(model)
        after = model(ids).logits
        fresh = copy.deepcopy(model)
        assert not torch.equal(before, after)
        assert torch.equal(fresh(ids).logits, after)
    assert len(linear_groups(fresh)) == len(linear_groups(model)) == 2 * (2 + 1 + 14) + 1
