"""Architectures with layers that keep a state: tokens of transformers, bits and gradients of the exact trainer."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.testing import assert_clean, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES
from tests.parity.test_architectures import (
    assert_transformers_tokens,
    draw_prompts,
)
from tests.parity.test_bits import mismatches, run_round
from tests.unit.peft_layers import PeftModel

QUICK = {"qwen3_5_text", "lfm2", "bamba"}
"""One with each of the functions over tokens."""
DTYPES = [torch.float32, torch.bfloat16]
MODULES = {("falcon_h1", dtype) for dtype in DTYPES} | {("kimi_linear", dtype) for dtype in DTYPES}
MODULES.add(("olmo_hybrid", torch.bfloat16))
"""Whose decoder layers do not run as one call."""
WITHOUT_PACKING = {"granitemoehybrid"}
"""Whose layers are not given positions."""

pytestmark = pytest.mark.usefixtures("own_products")


def named(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def directory_of(checkpoint, architecture, dtype=torch.float32):
    return checkpoint(architecture, dtype, **HYBRID_SIZES[architecture])


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", named(HYBRID_SIZES))
def test_tokens_and_log_probs_are_those_of_transformers(checkpoint, architecture):
    assert_transformers_tokens(directory_of(checkpoint, architecture), architecture)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", named(HYBRID_SIZES))
def test_no_bit_differs_from_the_trainer(checkpoint, architecture, dtype):
    directory = directory_of(checkpoint, architecture, dtype)
    trainer, rng = exact.enable(AutoModelForCausalLM.from_pretrained(directory)), random.Random(architecture)
    compiled = (architecture, dtype) not in MODULES
    compared, wrong = run_round(directory, trainer, rng, deterministic=True, compiled=compiled)
    assert compared > 100
    assert wrong == 0, f"{wrong} of {compared} log-probs differ"


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", named(HYBRID_SIZES))
def test_chunks_of_prompts_change_no_bit(checkpoint, architecture):
    directory, found = directory_of(checkpoint, architecture), []
    params = SamplingParams(max_tokens=9, logprobs=0, ignore_eos=True, seed=1)
    prompt = random.Random(architecture).choices(range(3, 259), k=130)
    for num_tokens in (1, 3, 64, 512):
        with LLM(str(directory), log_stats=False, max_num_batched_tokens=num_tokens, max_num_seqs=1) as llm:
            found.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0])
    for each in found[1:]:
        assert each.token_ids == found[0].token_ids
        np.testing.assert_array_equal(each.logprobs, found[0].logprobs)


def test_samples_of_one_prompt_and_snapshots_have_the_trainer_s_bits(checkpoint):
    """Many samples read one state, slots are scarce, and later prompts continue from states inside earlier ones."""
    directory = directory_of(checkpoint, "qwen3_5_text")
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    params = SamplingParams(n=5, max_tokens=20, logprobs=0, ignore_eos=True, seed=3)
    prompts = draw_prompts("forks")
    with LLM(str(directory), log_stats=False, max_num_seqs=4, block_size=4, state_cache_bytes=1 << 16) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate([prompt + [5, 6] for prompt in prompts], params, use_tqdm=False)
        assert_clean(llm.llm_engine)
    assert mismatches(outputs, trainer, 1.0) == (12 * 5 * 20, 0)


def test_drafted_tokens_change_no_bit(checkpoint):
    directory = directory_of(checkpoint, "bamba")
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    params = SamplingParams(n=4, max_tokens=40, logprobs=0, ignore_eos=True, seed=3, temperature=0.3)
    prompts = [[5, 6, 7] * 20, [9] * 30]
    with LLM(str(directory), log_stats=False, speculation=SpeculationConfig(max_draft_tokens=3)) as llm:
        core = llm.llm_engine.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for seed in (3, 4):  # the same samples, which are drafted right, and others
            outputs += llm.generate(prompts, params.clone(seed=seed), use_tqdm=False)
        assert sum(core.stats.drafts.num_accepted) > 0
        assert_clean(llm.llm_engine)
    assert mismatches(outputs, trainer, 0.3) == (3 * 2 * 4 * 40, 0)


@pytest.mark.parametrize("architecture", named(HYBRID_SIZES))
def test_packed_rows_and_shared_beginnings_have_the_bits_of_rows(checkpoint, architecture):
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory_of(checkpoint, architecture)))
    rng = random.Random(architecture)
    shared = [rng.randrange(3, 259) for _ in range(20)]
    rows = [shared + [rng.randrange(3, 259) for _ in range(size)] for size in (1, 7, 30)] + [[7, 8, 9]]
    one_by_one = [exact.token_logprobs(trainer, torch.tensor([row])).detach()[0] for row in rows]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[place < len(row) for place in range(length)] for row in rows])
    together = exact.token_logprobs(trainer, ids, mask).detach()
    for row, values in enumerate(one_by_one):
        assert torch.equal(together[row, : len(values)], values)
    packed = torch.tensor([[token for row in rows for token in row]])
    edges = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    if architecture in WITHOUT_PACKING:
        with pytest.raises(ConfigError, match="position_ids"):
            exact.token_logprobs(trainer, packed, cu_seqlens=edges)
        return
    values = exact.token_logprobs(trainer, packed, cu_seqlens=edges).detach()[0]
    for start, expected in zip(edges.tolist(), one_by_one, strict=False):
        assert torch.equal(values[start : start + len(expected)], expected)


@pytest.mark.parametrize("architecture", named(HYBRID_SIZES))
def test_gradients_are_those_of_transformers(architecture):
    """Up to the round-off of transformers' chunked formulas, from whose own recurrence they differ more than ours."""
    ids = torch.randint(3, 259, (3, 70), generator=torch.Generator().manual_seed(0))
    models = [tiny_model(architecture, std=0.05, **HYBRID_SIZES[architecture]).train() for _ in range(2)]
    exact.enable(models[0])
    for model in models:
        model.requires_grad_(True)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
    theirs = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            error, size = (parameter.grad - expected).norm(), expected.norm()
            assert error < 1e-4 * size + 2e-6, f"{name}: {error:.1e} of {size:.1e}"


def test_recomputed_layers_have_the_same_gradients():
    """Gradient checkpointing computes layers again, where packed sequences stay apart."""
    found = []
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    ids = torch.randint(3, 259, (1, 70), generator=torch.Generator().manual_seed(0))
    for checkpoints in (False, True):
        model = exact.enable(tiny_model("qwen3_5_text", **HYBRID_SIZES["qwen3_5_text"]).train().requires_grad_(True))
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
        exact.token_logprobs(model, ids, position_ids=positions).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_score_and_updates_reach_layers_with_states(checkpoint):
    trainer = tiny_model("qwen3_5_text", seed=1, **HYBRID_SIZES["qwen3_5_text"])
    params = SamplingParams(max_tokens=30, n=3, logprobs=0, ignore_eos=True, seed=4)
    with LLM(str(directory_of(checkpoint, "qwen3_5_text")), log_stats=False) as llm:
        llm.generate(draw_prompts("updates"), params, use_tqdm=False)
        llm.update_weights(trainer)
        outputs = llm.generate(draw_prompts("updates"), params, use_tqdm=False)
        samples = [(out.prompt_token_ids, sample) for out in outputs for sample in out.outputs]
        scored = llm.score([prompt for prompt, _ in samples], [sample.token_ids for _, sample in samples])
        llm.sleep(level=1)
        llm.wake_up()
        again = llm.generate(draw_prompts("updates"), params, use_tqdm=False)
    assert mismatches(outputs + again, exact.enable(trainer), 1.0) == (2 * 6 * 3 * 30, 0)
    for (_, sample), values in zip(samples, scored, strict=True):
        np.testing.assert_array_equal(sample.logprobs, values)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "down_proj")),
        pytest.param("bamba", ("in_proj", "out_proj"), marks=pytest.mark.slow),
        pytest.param("kimi_linear", ("q_proj", "f_b_proj", "kv_b_proj"), marks=pytest.mark.slow),
    ],
)
def test_adapters_of_layers_with_states_are_exact(checkpoint, architecture, targets):
    directory = directory_of(checkpoint, architecture)
    trainer = exact.enable(PeftModel(AutoModelForCausalLM.from_pretrained(directory), targets=targets))
    params = SamplingParams(max_tokens=20, n=2, logprobs=0, ignore_eos=True, seed=4)
    with LLM(str(directory), log_stats=False, max_num_batched_tokens=33) as llm:
        llm.add_lora(trainer.request())
        outputs = llm.generate(draw_prompts("adapters"), params, use_tqdm=False, lora_request="x")
    assert mismatches(outputs, trainer, 1.0) == (6 * 2 * 20, 0)


def test_a_draft_model_with_states_is_refused(checkpoint):
    speculation = SpeculationConfig(draft_model=str(directory_of(checkpoint, "lfm2")))
    with pytest.raises(ConfigError, match="has layers that keep a state, and these do not draft yet"):
        LLM(str(checkpoint("qwen3")), log_stats=False, speculation=speculation)
