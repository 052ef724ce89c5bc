"""Mixtures by any router, gpt-oss and latents on a device: engine and exact trainer agree bit for bit."""

import copy

import numpy as np
import pytest
import torch

from rollout_engine import ConfigError, SamplingParams, exact, routing
from rollout_engine.kernels.triton import tiling
from rollout_engine.model.cuda.decoder_parts import Mixture
from rollout_engine.model.cuda.experts import TrainedExperts, TrainedRouter
from rollout_engine.model.cuda.row_invariance import ARITHMETIC
from rollout_engine.model.modules.latent_attention import has_latents
from rollout_engine.model.modules.own_forwards import OwnForward, linears_read_by_routers
from rollout_engine.model.modules.routers import routers_of
from rollout_engine.testing import tiny_model
from rollout_engine.testing.architectures import SIZES
from rollout_engine.testing.models import tiny_checkpoint
from tests.unit.model.cuda.test_engine import GREEDY, assert_alike, run, runner_of
from tests.unit.model.cuda.test_exact import DRAWN, LONG, OPTIONS, SHORT, assert_those_of
from tests.unit.model.cuda.test_exact import run as run_drawn

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
FUSED = ["qwen2_moe", "dots1", "hy_v3"]
"""Built as Llama is: a plain router with a shared expert and its gate; sigmoids, a bias and groups."""
MODULES = ["gpt_oss", "deepseek_v3", "deepseek_v2"]
DTYPES = ["float32", "bfloat16"]
CASES = [
    pytest.param(name, dtype, marks=pytest.mark.slow)
    for name in (*FUSED, *MODULES)
    for dtype in DTYPES
    if (name, dtype) != ("deepseek_v2", "float32")
]


def sizes_of(architecture):
    """Sizes of a model of one layer, which is a mixture."""
    dense = {name: 0 for name in ("first_k_dense_replace", "num_dense_layers") if name in SIZES[architecture]}
    sparse = {"mlp_layer_types": ["sparse"]} if architecture == "hy_v3" else {}
    return SIZES[architecture] | dense | sparse | {"num_hidden_layers": 1}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A function from an architecture to a checkpoint of one layer, which is a mixture; made once."""
    made = {}

    def get(architecture):
        if architecture not in made:
            made[architecture] = tiny_checkpoint(
                tmp_path_factory.mktemp(architecture), architecture, **sizes_of(architecture)
            )
        return made[architecture]

    return get


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Two of attention's to a short context, a tile each."""
    monkeypatch.setattr(tiling, "_DETERMINISTIC_UNIT", 16)
    monkeypatch.setattr(tiling, "_tile", lambda *_: 16)


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_logprobs_are_the_trainers(engine_on, trainer_of, architecture, dtype):
    llm = engine_on("device", architecture, dtype=dtype, **OPTIONS)
    assert (runner_of(llm).model.decoder is not None) == (architecture in FUSED)
    assert_those_of(trainer_of(architecture, dtype), run_drawn(llm, LONG, SHORT, [7, 8, 9]))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*FUSED, *MODULES])
def test_tokens_and_logprobs_are_those_of_the_cpu(engine_on, architecture):
    options = {"num_kv_blocks": 23, "deterministic": False}
    ours, cpu = engine_on("device", architecture, **options), engine_on("cpu", architecture)
    model = runner_of(ours).model
    assert (model.decoder is not None) == (architecture in FUSED)
    if model.decoder is not None:
        assert all(isinstance(layer.mlp, Mixture) for layer in model.decoder._parts.layers)
    assert_alike(run(ours, GREEDY), run(cpu, GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dots1", "gpt_oss", "deepseek_v3"])
def test_routed_experts_are_recorded_and_a_replay_gives_the_trainers_bits(engine_on, trainer_of, architecture):
    llm, trainer = engine_on("device", architecture, dtype="float32", **OPTIONS), trainer_of(architecture, "float32")
    asking = SamplingParams(temperature=0.8, max_tokens=3, logprobs=0, seed=3, return_routed_experts=True)
    (output,) = llm.generate([{"prompt_token_ids": SHORT}], asking.clone(ignore_eos=True), use_tqdm=False)
    sample = output.outputs[0]
    ids = torch.tensor([SHORT + list(sample.token_ids)], device=next(trainer.parameters()).device)
    with routing.record(trainer) as recorded, torch.no_grad():
        trainer(ids)
    assert np.array_equal(sample.routed_experts, recorded.routed_experts[:-1].cpu().numpy())
    num_experts = runner_of(llm).model.routing.num_experts
    moved = (sample.routed_experts.astype(np.int64) + 1) % num_experts
    moved[3] = -1
    pair = [SHORT], [list(sample.token_ids)]
    for experts, is_own in ((sample.routed_experts, True), (moved, False)):
        (ours,) = llm.score(*pair, temperature=0.8, routed_experts=[experts])
        given = torch.from_numpy(experts.astype(np.int64))[None]
        with torch.no_grad():
            theirs = exact.token_logprobs(trainer, ids, temperature=0.8, routed_experts=given)
        assert ours.tolist() == theirs[0, len(SHORT) - 1 :].tolist()
        assert np.array_equal(ours, sample.logprobs) == is_own


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2_moe", "hy_v3", "gpt_oss", "deepseek_v3"])
def test_values_and_gradients_are_those_of_eager_modules(enable, device, architecture):
    sizes = sizes_of(architecture)
    reference = tiny_model(architecture, attn_implementation="eager", **sizes).requires_grad_(True).to(device)
    trainer = enable(copy.deepcopy(reference))
    ids = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    weights = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    ours = exact.token_logprobs(trainer, ids)
    theirs = reference(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, p), (_, q) in zip(reference.named_parameters(), trainer.named_parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 2e-4 * p.grad.norm() + 1e-6, name


@pytest.mark.slow
def test_new_weights_reach_experts_routers_and_the_matrix_of_latents(engine_on, enable):
    llm = engine_on("device", "deepseek_v3", dtype="float32", **OPTIONS)
    trainer = tiny_model("deepseek_v3", seed=1, **sizes_of("deepseek_v3"))
    llm.update_weights(trainer)
    assert_those_of(enable(trainer), run_drawn(llm, SHORT))
    llm.update_weights(tiny_model("deepseek_v3", **sizes_of("deepseek_v3")))  # other tests have it too


@pytest.mark.slow
def test_the_pool_holds_latents_in_place_of_keys_and_values(engine_on):
    llm = engine_on("device", "deepseek_v3", dtype="float32", **OPTIONS)
    kv, sizes = runner_of(llm).model.kv, SIZES["deepseek_v3"]
    (latents,) = (tensor for tensor in kv.tensors() if tensor is not kv.routed)
    assert latents.shape[-1] == sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"]
    assert has_latents(runner_of(llm).model.module)


def test_every_part_of_gpt_oss_and_deepseek_is_replaced(enable):
    trainers = {name: enable(tiny_model(name, **sizes_of(name))) for name in ("gpt_oss", "deepseek_v3")}
    for kind in (TrainedExperts, OwnForward):
        assert any(isinstance(child, kind) for child in trainers["gpt_oss"].modules())
    assert any(isinstance(child, TrainedRouter) for child in trainers["deepseek_v3"].modules())
    assert has_latents(trainers["deepseek_v3"])


def test_experts_that_return_their_input_are_refused_by_name(enable):
    model = tiny_model("longcat_flash", **SIZES["longcat_flash"])
    with pytest.raises(ConfigError, match="such as model.layers.0.mlp.experts.gate_up_proj"):
        enable(model)


def test_a_router_that_reads_the_weight_of_a_linear_multiplies_by_our_product(device):
    model = tiny_model("longcat_flash", **SIZES["longcat_flash"]).to(device)
    ours = copy.deepcopy(model)
    ARITHMETIC.make_row_invariant(ours)
    (theirs, *_), (mine, *_) = routers_of(model), routers_of(ours)
    assert mine._own_product is not None and linears_read_by_routers(ours)[0] is mine.classifier
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2)).to(device)
    for right, found in zip(theirs(x), mine(x), strict=True):
        torch.testing.assert_close(found.sort(-1).values, right.sort(-1).values)


def test_a_module_whose_rows_may_depend_on_the_batch_is_refused_by_name(engine_on):
    with pytest.raises(ConfigError, match="deterministic=True is not possible on a device.*GPT2.*c_attn"):
        engine_on("device", "gpt2", **OPTIONS)


@pytest.mark.slow
def test_modules_that_give_a_trainer_other_bits_are_refused(engine_on, monkeypatch):
    values = lambda self, layer, q, k, v, *_: v.repeat_interleave(q.shape[1] // v.shape[1], 1)  # noqa: E731
    monkeypatch.setattr("rollout_engine.model.cuda.attention.ModuleStep.attend", values)
    with pytest.raises(ConfigError, match="bit for bit those that the same modules give a trainer"):
        engine_on("device", "gpt_oss", num_kv_blocks=12, **OPTIONS)


DRAWN_ALONE = DRAWN.clone(n=1, max_tokens=2)


@pytest.mark.slow
def test_a_row_of_modules_has_the_same_bits_in_any_batch(engine_on):
    llm = engine_on("device", "gpt_oss", dtype="bfloat16", **OPTIONS)
    together = run(llm, DRAWN_ALONE, [LONG, SHORT, [7, 8, 9]])
    for index, prompt in enumerate((LONG, SHORT, [7, 8, 9])):
        llm.reset_prefix_cache()
        assert_alike(run(llm, DRAWN_ALONE, [prompt]), [together[index]], bound=0)
