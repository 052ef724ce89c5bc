"""Which foreign routers, experts and mixtures are known to compute our formulas, and which only look alike."""

import pytest
import torch
from torch import nn
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from rollout_engine.kernels.routing_rule import Groups
from rollout_engine.model.modules.expert_patterns import (
    are_gated_experts,
    expert_form,
    router_pattern,
)
from rollout_engine.model.modules.experts import Routing
from rollout_engine.model.modules.mixture_patterns import MixtureParts, mixture_pattern
from rollout_engine.testing import tiny_config

DTYPES = [torch.float32, torch.bfloat16]
PARTS = MixtureParts("gate", "experts")
SIZES = dict(num_experts=7, num_local_experts=7, num_experts_per_tok=3, moe_intermediate_size=40)


def module_of(cls, architecture, dtype=torch.float32, **overrides):
    module = cls(tiny_config(architecture, **(SIZES | overrides)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.2)
    return module.to(dtype).requires_grad_(False)


class _WithOtherFloor(HYV3TopKRouter):
    """Adds another small number to the sum of its weights."""

    def forward(self, hidden_states, e_score_correction_bias):
        logits, weights, experts = super().forward(hidden_states, e_score_correction_bias)
        scores = logits.sigmoid().gather(1, experts)
        return logits, scores / (scores.sum(-1, keepdim=True) + 1e-9) * self.router_scaling_factor, experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [True, False])
def test_a_router_is_recognised_with_its_way_of_choosing(dtype, normalised):
    router = module_of(Qwen3MoeTopKRouter, "qwen3_moe", dtype, norm_topk_prob=normalised)
    assert router_pattern(router).routing == Routing(normalised, rounded=True)


def test_a_router_that_keeps_float32_is_told_from_one_that_rounds():
    assert router_pattern(module_of(MixtralTopKRouter, "mixtral", torch.bfloat16)).routing == Routing(
        True, rounded=False
    )


def test_a_softmax_over_the_largest_logits_is_that_of_all_with_their_sum_divided_out():
    found = router_pattern(module_of(GraniteMoeTopKRouter, "granitemoe", torch.bfloat16))
    assert (found.routing, found.logits_dtype) == (Routing(True, rounded=True), torch.float32)


@pytest.mark.parametrize(
    "module",
    [
        module_of(GptOssTopKRouter, "gpt_oss"),
        module_of(PhimoeTopKRouter, "phimoe"),
        module_of(LagunaTopKRouter, "laguna", moe_router_logit_softcapping=5.0),
        module_of(_WithOtherFloor, "hy_v3"),
        nn.Linear(8, 6, bias=False),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_routers_are_left_alone(module):
    assert router_pattern(module) is None


MANY = dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 64)
GROUPED = MANY | dict(n_group=8, topk_group=3, num_experts_per_tok=6, norm_topk_prob=True)
BIASED = Routing(True, True, sigmoid=True)
ROUTERS = [
    (DeepseekV2TopkRouter, "deepseek_v2", dict(routed_scaling_factor=3.0), Routing(False, True, scaling=3.0)),
    (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        GROUPED | dict(topk_method="group_limited_greedy"),
        Routing(False, True, groups=Groups(8, 3, sums_two=False)),
    ),
    (DeepseekV3TopkRouter, "deepseek_v3", dict(n_group=1, topk_group=1), BIASED._replace(scaling=2.5, added=1e-20)),
    (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        GROUPED,
        BIASED._replace(groups=Groups(8, 3, sums_two=True), scaling=2.5, added=1e-20),
    ),
    (DeepseekV3TopkRouter, "deepseek_v3", GROUPED | dict(norm_topk_prob=False, n_group=1, topk_group=1), None),
    (HYV3TopKRouter, "hy_v3", {}, BIASED._replace(scaling=2.826, added=1e-20)),
    (LagunaTopKRouter, "laguna", {}, BIASED),
    (MiniMaxM2TopKRouter, "minimax_m2", {}, BIASED),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "architecture", "fields", "routing"), ROUTERS)
def test_scores_biases_groups_and_scales_of_a_router_are_found(cls, architecture, fields, routing, dtype):
    found = router_pattern(module_of(cls, architecture, dtype, **fields))
    if routing is None:
        routing = Routing(False, True, sigmoid=True, scaling=2.5)
    if dtype == torch.bfloat16:
        is_float32 = cls in (DeepseekV2TopkRouter, DeepseekV3TopkRouter, HYV3TopKRouter)
        routing = routing._replace(rounded=cls is LagunaTopKRouter, precise=is_float32)
    assert found.routing == routing
    assert found.has_bias == (cls is not DeepseekV2TopkRouter)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_experts", [4, 64, 512])
def test_any_number_of_experts_is_recognised(num_experts, dtype):
    sizes = dict.fromkeys(MANY, num_experts) | dict(n_group=1, topk_group=1, num_experts_per_tok=min(8, num_experts))
    assert router_pattern(module_of(DeepseekV3TopkRouter, "deepseek_v3", dtype, **sizes)).bias_name is not None
    sizes = dict.fromkeys(MANY, num_experts) | dict(num_experts_per_tok=min(8, num_experts))
    plain = router_pattern(module_of(Qwen3MoeTopKRouter, "qwen3_moe", dtype, **sizes))
    assert plain.routing == Routing(plain.routing.normalised, True)  # shares of all experts are their scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "architecture"), [(Qwen3MoeExperts, "qwen3_moe"), (MixtralExperts, "mixtral")])
def test_gated_experts_are_recognised(cls, architecture, dtype):
    assert are_gated_experts(module_of(cls, architecture, dtype))


class _ScaledExperts(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) * 1.01


@pytest.mark.parametrize(
    "module",
    [
        module_of(_ScaledExperts, "qwen3_moe"),
        module_of(Qwen3MoeExperts, "qwen3_moe", hidden_act="gelu"),
        module_of(GptOssExperts, "gpt_oss"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_experts_are_left_alone(module):
    assert not are_gated_experts(module)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cls", "architecture", "is_transposed", "has_bias", "has_gate"),
    [
        (Qwen3MoeExperts, "qwen3_moe", False, False, False),
        (AriaExperts, "aria_text", True, False, False),
        (Gemma4TextExperts, "gemma4_text", False, False, True),
        (GptOssExperts, "gpt_oss", True, True, True),
        (LongcatFlashExperts, "longcat_flash", False, False, False),
    ],
)
def test_the_form_of_experts_is_found(cls, architecture, is_transposed, has_bias, has_gate, dtype):
    form = expert_form(module_of(cls, architecture, dtype, n_routed_experts=4, zero_expert_num=3))
    assert (form.is_transposed, form.has_bias, form.gate is not None) == (is_transposed, has_bias, has_gate)
    assert form.has_identities == (cls is LongcatFlashExperts)


class _BiasedOnce(GptOssExperts):
    """Adds the biases of the second product to the sum of a token's experts."""

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        out = super().forward(hidden_states, router_indices, routing_weights)
        return out + (1 - routing_weights.sum(-1, keepdim=True)) * self.down_proj_bias[0]


@pytest.mark.parametrize(
    "module", [module_of(_ScaledExperts, "qwen3_moe"), module_of(_BiasedOnce, "gpt_oss"), nn.Linear(8, 6)]
)
def test_experts_of_no_known_form_have_none(module):
    assert expert_form(module) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cls", "architecture", "routing"),
    [
        (Qwen3MoeSparseMoeBlock, "qwen3_moe", Routing(True, rounded=True)),
        (MixtralSparseMoeBlock, "mixtral", Routing(True, rounded=False)),
        (OlmoeSparseMoeBlock, "olmoe", Routing(False, rounded=True)),
    ],
)
def test_a_mixture_is_recognised_with_its_way_of_choosing(cls, architecture, routing, dtype):
    given = {"norm_topk_prob": routing.normalised, "router_jitter_noise": 0.0}
    found = module_of(cls, architecture, dtype, **given)
    assert mixture_pattern(found, PARTS).reason is None
    wanted = routing if dtype == torch.bfloat16 else routing._replace(rounded=True)  # float32 is not rounded
    assert router_pattern(found.gate).routing == wanted


class _ScaledMixture(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.01


@pytest.mark.parametrize(
    "module",
    [
        module_of(_ScaledMixture, "qwen3_moe"),
        module_of(Qwen2MoeSparseMoeBlock, "qwen2_moe", shared_expert_intermediate_size=40),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_mixtures_are_left_alone(module):
    assert mixture_pattern(module, PARTS).reason is not None
