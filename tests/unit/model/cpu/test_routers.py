"""Routers of every formula compute what transformers does, with its gradients, and a token's bits are its own."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from rollout_engine import ConfigError, exact, routing
from rollout_engine.model.cpu.experts import RowInvariantRouter
from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.modules.own_forwards import OwnForward
from rollout_engine.model.modules.routers import replaying, routers_of
from rollout_engine.testing import tiny_config, tiny_model
from rollout_engine.testing.architectures import SIZES

HIDDEN = 64
FEW, MANY = ({name: size for name in ("num_experts", "num_local_experts", "n_routed_experts")} for size in (4, 64))
FEW |= dict(num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True)
MANY |= dict(num_experts_per_tok=6, n_group=8, topk_group=3, topk_method="group_limited_greedy", norm_topk_prob=True)
for fields in (FEW, MANY):
    fields |= dict(top_k_experts=fields["num_experts_per_tok"], moe_topk=fields["num_experts_per_tok"])
    fields |= dict(zero_expert_num=0)
FORMULAS = {
    "deepseek_v2": DeepseekV2TopkRouter,
    "deepseek_v3": DeepseekV3TopkRouter,
    "hy_v3": HYV3TopKRouter,
    "laguna": LagunaTopKRouter,
    "minimax_m2": MiniMaxM2TopKRouter,
    "qwen2_moe": Qwen2MoeTopKRouter,
}
OWN_FORWARDS = {
    "afmoe": AfmoeTokenChoiceRouter,
    "ernie4_5_moe": Ernie4_5_MoeTopKRouter,
    "gemma4_text": Gemma4TextRouter,
    "gpt_oss": GptOssTopKRouter,
    "kolibri1": Kolibri1TopKRouter,
    "longcat_flash": LongcatFlashTopkRouter,
    "phimoe": PhimoeTopKRouter,
}
ROUTERS = [
    pytest.param(name, fields, id=f"{name}-{fields['num_experts']}")
    for name in FORMULAS | OWN_FORWARDS
    for fields in (FEW, MANY)
    if (name, fields["num_experts"]) != ("phimoe", 64)  # it chooses two
]
GIVEN_A_BIAS = {"afmoe", "hy_v3", "minimax_m2"}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair_of(name, fields, dtype=torch.float32):
    """transformers' router, and ours."""
    config = tiny_config(name, **fields)
    theirs = (FORMULAS | OWN_FORWARDS)[name](config).to(dtype).eval()
    with torch.no_grad():
        for index, tensor in enumerate([*theirs.parameters(), *theirs.buffers()]):
            tensor.copy_(noise(*tensor.shape, seed=index) * (0.2 if tensor.squeeze().dim() > 1 else 0.1))
    ours = copy.deepcopy(theirs)
    make_row_invariant(ours)
    return theirs, ours


def route(router, name, x):
    """(weights, experts), of each token in the order of the experts."""
    bias = [noise(64, seed=7)[: len(next(router.parameters()))] * 0.1] if name in GIVEN_A_BIAS else []
    _, weights, experts = router(x[None] if name == "afmoe" else x, *bias)
    order = experts.argsort(-1)
    return weights.gather(-1, order), experts.gather(-1, order)


@pytest.mark.quick(17)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "fields"), ROUTERS)
def test_they_choose_and_weight_as_transformers_does(name, fields, dtype):
    theirs, ours = pair_of(name, fields, dtype)
    assert isinstance(ours, RowInvariantRouter if name in FORMULAS else OwnForward)
    x = noise(200, HIDDEN).to(dtype)
    with torch.no_grad():
        (expected, their_experts), (found, experts) = route(theirs, name, x), route(ours, name, x)
    same = (experts == their_experts).all(-1)
    assert found.dtype == expected.dtype and same.float().mean() > (0.99 if dtype == torch.float32 else 0.7)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found[same], expected[same], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "fields"), ROUTERS)
def test_a_tokens_bits_are_its_own(name, fields, dtype):
    _, ours = pair_of(name, fields, dtype)
    x = noise(200, HIDDEN, seed=3).to(dtype)
    x[5:9] = 0.0  # all scores of these are equal
    with torch.no_grad():
        whole = route(ours, name, x)
        for height in (*range(1, 18), 33, 100):
            for start in (0, 3, 7):
                part = route(ours, name, x[start : start + height])
                assert all(torch.equal(a, b[start : start + height]) for a, b in zip(part, whole, strict=True))


@pytest.mark.quick(15)
@pytest.mark.parametrize(("name", "fields"), ROUTERS)
def test_gradients_are_those_of_transformers(name, fields):
    found = []
    x, to = noise(50, HIDDEN, seed=3), noise(50, fields["num_experts_per_tok"], seed=4)
    for router in pair_of(name, fields):
        inputs = x.clone().requires_grad_()
        (weights, experts), own = route(router, name, inputs), next(router.parameters())
        found.append((experts, *torch.autograd.grad((weights * to).sum(), (inputs, own))))
    (experts, *theirs), (our_experts, *ours) = found
    assert torch.equal(experts, our_experts)
    for expected, got in zip(theirs, ours, strict=True):
        assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "afmoe", "gemma4_text", "longcat_flash"])
def test_experts_can_be_replayed(name):
    _, ours = pair_of(name, MANY)
    given = torch.tensor([[9, 3, 60, 2, 1, 33], [-1] * 6, [63, 0, 5, 7, 9, 11]])
    with torch.no_grad(), replaying([ours], given[:, None]):
        _, experts = route(ours, name, noise(3, HIDDEN))
    assert torch.equal(experts[[0, 2]], given[[0, 2]].sort(-1).values)


def test_a_router_that_calls_no_topk_is_recorded_and_refuses_to_replay():
    model = tiny_model("phimoe", **(SIZES["mixtral"] | FEW)).eval()
    ids = torch.arange(3, 15)[None]
    with routing.record(model) as found, torch.no_grad():
        model(ids)
    with routing.replay(model, found.routed_experts), pytest.raises(ConfigError, match="cannot replay experts"):
        model(ids)


def test_enabling_twice_changes_nothing_and_names_stay():
    model = tiny_model("afmoe", **(SIZES["mixtral"] | FEW | dict(num_dense_layers=1)))
    names = list(model.state_dict())
    kinds = [[type(child) for child in exact.enable(model).modules()] for _ in range(2)]
    assert kinds[0] == kinds[1] and list(model.state_dict()) == names
    assert len(routers_of(model)) == 1


class _Doubled(nn.Module):
    """A router that multiplies by something else than its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(noise(8, HIDDEN)), 2

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states, self.weight * 2)
        values, experts = logits.tanh().topk(self.top_k)
        return logits, values, experts


def test_a_product_by_another_matrix_than_the_weight_is_left_alone():
    router = _Doubled()
    make_row_invariant(router)
    assert type(router) is _Doubled
