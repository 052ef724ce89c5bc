"""Models whose indexers choose positions: tokens of transformers, bits and gradients of the exact trainer."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rollout_engine import LLM, LLMEngine, SamplingParams, exact
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.model.loading.loader import load_model
from rollout_engine.testing import assert_clean, tiny_model
from rollout_engine.testing.architectures import INDEXED_SIZES
from tests.parity.test_architectures import (
    assert_transformers_tokens,
    draw_prompts,
)
from tests.parity.test_bits import mismatches, run_round
from tests.unit.peft_layers import PeftModel

pytestmark = [
    pytest.mark.usefixtures("own_products"),
    pytest.mark.skipif(not INDEXED_SIZES.keys() <= set(CONFIG_MAPPING), reason="a release without these types"),
]
QUICK = "glm_moe_dsa"
"""With layers that share the choice of another one."""
ARCHITECTURES = pytest.mark.parametrize(
    "architecture", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in INDEXED_SIZES]
)
TOPK = 24
"""Positions that are chosen in these models."""


def directory_of(checkpoint, architecture, dtype=torch.float32, **overrides):
    return checkpoint(architecture, dtype, **INDEXED_SIZES[architecture] | overrides)


def trainer_of(directory):
    return exact.enable(AutoModelForCausalLM.from_pretrained(directory))


def runner_of(llm):
    return llm.frontend.client.driver.executor.worker.runner


@ARCHITECTURES
def test_tokens_and_log_probs_are_those_of_transformers(checkpoint, architecture):
    assert_transformers_tokens(directory_of(checkpoint, architecture), architecture)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ARCHITECTURES
def test_no_bit_differs_from_the_trainer(checkpoint, architecture, dtype):
    directory = directory_of(checkpoint, architecture, dtype)
    compared, wrong = run_round(
        directory, trainer_of(directory), random.Random(architecture), deterministic=True, compiled=False
    )
    assert compared > 100
    assert wrong == 0, f"{wrong} of {compared} log-probs differ"


@ARCHITECTURES
def test_chunks_of_prompts_change_no_bit_and_keys_are_cached(checkpoint, architecture):
    directory, found = directory_of(checkpoint, architecture), []
    sizes = INDEXED_SIZES[architecture]
    params = SamplingParams(max_tokens=9, logprobs=0, ignore_eos=True, seed=1)
    prompt = random.Random(architecture).choices(range(3, 259), k=130)
    for num_tokens in (1, 48, 512):
        options = dict(max_num_batched_tokens=num_tokens, max_num_seqs=1, num_kv_blocks=10, block_size=16)
        with LLM(str(directory), log_stats=False, **options) as llm:
            found.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0])
            pool = list(runner_of(llm).model.kv.tensors())
    num_layers, num_indexers = (3, 2) if architecture == QUICK else (2, 2)
    latents = num_layers * (sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"])
    assert sum(each.numel() for each in pool) == 160 * (latents + num_indexers * sizes["index_head_dim"])
    for each in found[1:]:
        assert each.token_ids == found[0].token_ids
        np.testing.assert_array_equal(each.logprobs, found[0].logprobs)


def test_as_long_as_all_positions_are_chosen_bits_are_those_of_dense_attention():
    """The first tokens of a long row are read by their slots, those of a short row and of another model are not."""
    ids = torch.randint(3, 259, (1, 70), generator=torch.Generator().manual_seed(0))
    sparse = exact.enable(tiny_model("deepseek_v32", **INDEXED_SIZES["deepseek_v32"]))
    dense = tiny_model("deepseek_v32", **INDEXED_SIZES["deepseek_v32"] | dict(index_topk=70))
    dense.load_state_dict(sparse.state_dict())
    with torch.no_grad():
        long, other = (exact.token_logprobs(each, ids)[0] for each in (sparse, exact.enable(dense)))
        short = exact.token_logprobs(sparse, ids[:, :TOPK])[0]
    assert torch.equal(long[: TOPK - 1], short) and torch.equal(long[: TOPK - 1], other[: TOPK - 1])
    assert not torch.equal(long[TOPK:], other[TOPK:])


def test_drafted_tokens_change_no_bit(checkpoint):
    directory = directory_of(checkpoint, QUICK)
    params = SamplingParams(n=4, max_tokens=40, logprobs=0, ignore_eos=True, seed=3, temperature=0.3)
    prompts = [[5, 6, 7] * 20, [9] * 30]
    with LLM(str(directory), log_stats=False, speculation=SpeculationConfig(max_draft_tokens=3)) as llm:
        core = llm.llm_engine.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts, params, use_tqdm=False)  # the same samples, which are drafted right
        assert sum(core.stats.drafts.num_accepted) > 0
        assert_clean(llm.llm_engine)
    assert mismatches(outputs, trainer_of(directory), 0.3) == (2 * 2 * 4 * 40, 0)


@ARCHITECTURES
def test_packed_rows_and_shared_beginnings_have_the_bits_of_rows(checkpoint, architecture):
    trainer = trainer_of(directory_of(checkpoint, architecture))
    rng = random.Random(architecture)
    shared = [rng.randrange(3, 259) for _ in range(30)]
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
    values = exact.token_logprobs(trainer, packed, cu_seqlens=edges).detach()[0]
    for start, expected in zip(edges.tolist(), one_by_one, strict=False):
        assert torch.equal(values[start : start + len(expected)], expected)


@ARCHITECTURES
def test_gradients_are_those_of_transformers_and_indexers_have_none(architecture):
    ids = torch.randint(3, 259, (3, 70), generator=torch.Generator().manual_seed(0))
    models = [tiny_model(architecture, std=0.05, **INDEXED_SIZES[architecture]).train() for _ in range(2)]
    exact.enable(models[0])
    for model in models:
        model.requires_grad_(True)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
    theirs = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None) == (".indexer." in name), name
        if expected is not None:
            error, size = (parameter.grad - expected).norm(), expected.norm()
            assert error < 1e-4 * size + 2e-6, f"{name}: {error:.1e} of {size:.1e}"


def test_recomputed_layers_have_the_same_gradients():
    """Gradient checkpointing computes layers again, where packed sequences stay apart."""
    found = []
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    ids = torch.randint(3, 259, (1, 70), generator=torch.Generator().manual_seed(0))
    for checkpoints in (False, True):
        model = exact.enable(tiny_model(QUICK, **INDEXED_SIZES[QUICK]).train().requires_grad_(True))
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
        exact.token_logprobs(model, ids, position_ids=positions).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_updates_between_steps_are_exact_and_old_keys_stay_or_go(checkpoint, kv):
    """The tokens before an update have the old model's bits, with `recompute` those behind it the new one's."""
    directory = directory_of(checkpoint, QUICK)
    old, new = trainer_of(directory), exact.enable(tiny_model(QUICK, seed=1, **INDEXED_SIZES[QUICK]))
    engine = LLMEngine.from_config(EngineConfig(model=str(directory), log_stats=False))
    params = SamplingParams(n=2, max_tokens=16, logprobs=0, ignore_eos=True, seed=3)
    prompt = list(range(3, 100))
    engine.add_request("a", {"prompt_token_ids": prompt}, params)
    outputs = [output for _ in range(6) for output in engine.step()]
    engine.update_weights(new, kv=kv)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for sample in outputs[-1].outputs:
        first, second = sample.version_spans
        ids = torch.tensor([prompt + list(sample.token_ids)])
        with torch.no_grad():
            before, after = (exact.token_logprobs(each, ids)[0, len(prompt) - 1 :].numpy() for each in (old, new))
        assert np.array_equal(sample.logprobs[: first.end], before[: first.end])
        assert np.array_equal(sample.logprobs[first.end :], after[first.end :]) == (kv == "recompute")
        assert second.kv_min_version == (0 if kv == "keep" else 1)


@pytest.mark.slow
def test_score_updates_and_sleep_reach_indexers(checkpoint):
    trainer = tiny_model(QUICK, seed=1, **INDEXED_SIZES[QUICK])
    params = SamplingParams(max_tokens=30, n=3, logprobs=0, ignore_eos=True, seed=4)
    with LLM(str(directory_of(checkpoint, QUICK)), log_stats=False) as llm:
        llm.generate(draw_prompts("updates"), params, use_tqdm=False)
        llm.update_weights(copy.deepcopy(trainer))
        outputs = llm.generate(draw_prompts("updates"), params, use_tqdm=False)
        samples = [(out.prompt_token_ids, sample) for out in outputs for sample in out.outputs]
        scored = llm.score([prompt for prompt, _ in samples], [sample.token_ids for _, sample in samples])
        llm.sleep(level=1)
        llm.wake_up()
        again = llm.generate(draw_prompts("updates"), params, use_tqdm=False)
    assert mismatches(outputs + again, exact.enable(trainer), 1.0) == (2 * 6 * 3 * 30, 0)
    for (_, sample), values in zip(samples, scored, strict=True):
        np.testing.assert_array_equal(sample.logprobs, values)


@pytest.mark.slow
def test_adapters_are_exact_too(checkpoint):
    directory = directory_of(checkpoint, QUICK)
    trainer = exact.enable(PeftModel(AutoModelForCausalLM.from_pretrained(directory), targets=("kv_b_proj", "wk")))
    params = SamplingParams(max_tokens=20, n=2, logprobs=0, ignore_eos=True, seed=4)
    with LLM(str(directory), log_stats=False, max_num_batched_tokens=33) as llm:
        llm.add_lora(trainer.request())
        outputs = llm.generate(draw_prompts("adapters"), params, use_tqdm=False, lora_request="x")
    assert mismatches(outputs, trainer, 1.0) == (6 * 2 * 20, 0)


def test_ranks_and_devices_are_refused(checkpoint):
    config, seat = EngineConfig(model=str(directory_of(checkpoint, QUICK))), SimpleNamespace(rank=0, num_ranks=2)
    with pytest.raises(ConfigError, match="positions chosen by an indexer is served by one process"):
        load_model(config, seat=seat)
    with pytest.raises(ConfigError, match="positions chosen by an indexer runs on CPUs only. Use device='cpu'"):
        load_model(config, torch.device("cuda"))
