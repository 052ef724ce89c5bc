"""Models with multi-head latent attention: the pool holds latents, and no bit differs between engine and trainer."""

import copy
import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from rollout_engine import LLM, RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.testing import assert_clean, random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import SIZES
from tests.parity.test_bits import draw_prompts, mismatches, run_round
from tests.unit.peft_layers import PeftModel

pytestmark = [
    pytest.mark.usefixtures("own_products"),
    pytest.mark.skipif(not hasattr(DeepseekV3Attention, "expand_kv"), reason="a release with expanded keys alone"),
]
DENSE = SIZES["deepseek_v3"] | dict(first_k_dense_replace=2, mlp_layer_types=["dense", "dense"])
"""Without experts: all else of these architectures is exact."""
CACHED = DENSE["kv_lora_rank"] + DENSE["qk_rope_head_dim"]
CASES = [
    ("deepseek_v3", torch.float32),
    ("deepseek_v3", torch.bfloat16),
    ("glm4_moe_lite", torch.float32),
    *(
        pytest.param(name, dtype, marks=pytest.mark.slow)
        for name in ("deepseek_v2", "glm4_moe_lite", "minicpm3")
        for dtype in (torch.float32, torch.bfloat16)
    ),
]
TINY_POOL = dict(block_size=4, num_kv_blocks=70, max_num_batched_tokens=33, max_num_seqs=64, enable_prefix_caching=True)
"""Prompts are computed in chunks, and sequences preempted."""


def runner_of(llm):
    return llm.frontend.client.driver.executor.worker.runner


@pytest.mark.quick(1)
@pytest.mark.parametrize(("architecture", "dtype"), CASES, ids=str)
def test_no_bit_differs_from_the_trainer(checkpoint, architecture, dtype):
    directory = checkpoint(architecture, dtype, **DENSE)
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    compared, wrong = run_round(directory, trainer, random.Random(architecture), compiled=False, deterministic=True)
    assert compared > 100
    assert wrong == 0, f"{wrong} of {compared} log-probs differ"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_chunks_prefix_hits_and_preemption_change_no_bit_and_the_pool_holds_latents(checkpoint, dtype):
    directory = checkpoint("deepseek_v3", dtype, **DENSE)
    params = SamplingParams(max_tokens=30, n=3, seed=3, logprobs=0, ignore_eos=True)
    with LLM(str(directory), dtype=str(dtype)[6:], deterministic=True, log_stats=False, **TINY_POOL) as llm:
        outputs = llm.generate(draw_prompts(random.Random(0)), params, use_tqdm=False)
        outputs += llm.generate(draw_prompts(random.Random(0)), params, use_tqdm=False)
        stats = llm.frontend.client.driver.core.stats
        assert stats.num_preemptions and stats.num_cached_tokens
        assert_clean(llm.llm_engine)
        pool = list(runner_of(llm).model.kv.tensors())
        assert sum(tensor.nbytes for tensor in pool) == 2 * 70 * 4 * CACHED * dtype.itemsize
    compared, wrong = mismatches(
        outputs, exact.enable(AutoModelForCausalLM.from_pretrained(directory)), params.temperature
    )
    assert (compared, wrong) == (2 * 7 * 3 * 30, 0)


def test_a_pool_of_given_bytes_holds_more_tokens_than_one_of_keys_and_values(checkpoint):
    directory = checkpoint("deepseek_v3", torch.float32, **DENSE)
    heads, sizes = DENSE["num_attention_heads"], DENSE["qk_nope_head_dim"] + DENSE["qk_rope_head_dim"]
    expanded = heads * (sizes + DENSE["v_head_dim"])
    num_tokens = 640
    with LLM(str(directory), log_stats=False, kv_cache_bytes=2 * expanded * 4 * num_tokens, block_size=16) as llm:
        num_blocks = {len(tensor) for tensor in runner_of(llm).model.kv.tensors()}
    assert num_blocks == {num_tokens * expanded // (16 * CACHED)} and min(num_blocks) > 4 * num_tokens // 16


def test_log_probs_are_close_to_transformers_own_and_so_are_gradients(checkpoint):
    directory = checkpoint("deepseek_v3", torch.float32, **DENSE)
    ids = torch.randint(3, 259, (2, 70), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ours = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    found = exact.token_logprobs(ours, ids)
    wanted = theirs(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found.sum().backward(), wanted.sum().backward()
    for (name, mine), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: name + text)


def test_an_update_reaches_the_matrix_that_latents_are_read_by(checkpoint):
    directory = checkpoint("deepseek_v3", torch.float32, **DENSE)
    trainer = tiny_model("deepseek_v3", seed=1, **DENSE)
    params = SamplingParams(max_tokens=8, n=2, seed=3, logprobs=0, ignore_eos=True)
    with LLM(str(directory), deterministic=True, log_stats=False) as llm:
        llm.generate(draw_prompts(random.Random(0)), params, use_tqdm=False)
        llm.update_weights(trainer)
        llm.sleep(level=1)
        llm.wake_up()
        outputs = llm.generate(draw_prompts(random.Random(0)), params, use_tqdm=False)
    assert mismatches(outputs, exact.enable(trainer), 1.0) == (7 * 2 * 8, 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_of_the_matrix_are_exact_too(tmp_path, dtype):
    path = tiny_checkpoint(tmp_path, "deepseek_v3", dtype=dtype, **DENSE)
    targets = ("kv_b_proj", "o_proj", "kv_a_proj_with_mqa")
    trainer = exact.enable(PeftModel(tiny_model("deepseek_v3", dtype=dtype, **DENSE), targets, rank=5))
    params, name = SamplingParams(max_tokens=20, ignore_eos=True), str(dtype).removeprefix("torch.")
    with RolloutPolicy.from_pretrained(path, dtype=name, deterministic=True, max_model_len=256) as policy:
        policy.add_lora(trainer.request())
        policy.add_lora(random_adapter(tiny_model("deepseek_v3", **DENSE), "other"))
        batches = [
            policy.rollout(["abc", "x" * 70], params, num_samples=3, seed=1, lora_request=lora, use_tqdm=False)
            for lora in ("x", "other", None)
        ]
    columns = [batch["masks", "all_assistant_mask"][:, 1:] for batch in batches]
    sampled = [batch["log_probs", "full"][:, 1:][chosen] for batch, chosen in zip(batches, columns, strict=True)]
    ours = exact.token_logprobs(trainer, batches[0])
    assert torch.equal(ours[columns[0]].detach(), sampled[0])
    assert not torch.equal(exact.token_logprobs(trainer, batches[1]["tokens", "full"])[columns[1]].detach(), sampled[1])
    ours.sum().backward()
    assert all(layer.lora_B["default"].weight.grad.any() for layer in trainer.adapters())
    for layer in trainer.adapters():
        layer.disable_adapters = True
    ids, mask = batches[2]["tokens", "full"], batches[2]["masks", "all_attention_mask"]
    assert torch.equal(exact.token_logprobs(trainer, ids, mask)[columns[2]].detach(), sampled[2])


def test_an_adapter_that_no_engine_computes_is_refused():
    trainer = exact.enable(PeftModel(tiny_model("deepseek_v3", **DENSE), ("kv_b_proj",), dropout=0.1))
    trainer.train()
    with pytest.raises(ConfigError, match="kv_b_proj has an adapter that is not one plain LoRA"):
        trainer(input_ids=torch.arange(3, 20)[None])


def test_an_adapter_around_an_enabled_model_is_refused_until_it_is_enabled_too():
    trainer = PeftModel(exact.enable(tiny_model("deepseek_v3", **DENSE)), ("kv_b_proj",))
    with pytest.raises(ConfigError, match="kv_b_proj is a LoraLinear now"):
        trainer(input_ids=torch.arange(3, 20)[None])
    with torch.no_grad():
        assert exact.enable(trainer)(input_ids=torch.arange(3, 20)[None]).logits.isfinite().all()


def test_packed_products_follow_writes_and_copies_of_a_trainer_have_their_own():
    trainer, ids = exact.enable(tiny_model("deepseek_v3", **DENSE)), torch.arange(3, 40)[None]
    with torch.no_grad():
        before = trainer(input_ids=ids).logits
        twin, projection = copy.deepcopy(trainer), trainer.model.layers[0].self_attn.kv_b_proj
        assert all(group.packed_heads() is not None for group in projection._head_groups)
        projection.weight.data.mul_(1.5)  # which no version counts
        after = trainer(input_ids=ids).logits
        fresh = tiny_model("deepseek_v3", **DENSE)
        fresh.load_state_dict(trainer.state_dict())
        assert torch.equal(exact.enable(fresh)(input_ids=ids).logits, after) and not torch.equal(before, after)
        assert torch.equal(twin(input_ids=ids).logits, before)


def test_packed_copies_are_counted_and_given_back_by_a_sleep(checkpoint):
    directory = checkpoint("deepseek_v3", torch.float32, **DENSE)
    params = SamplingParams(max_tokens=8, seed=3, logprobs=0, ignore_eos=True)
    with LLM(str(directory), deterministic=True, log_stats=False) as llm:
        groups = [group for layer in range(2) for group in heads_of(llm, layer)]
        assert all(group.packed is not None and not group.follows_writes for group in groups)
        before = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
        llm.sleep(level=1)
        assert all(group.packed is None for group in groups)
        llm.wake_up()
        after = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
        assert before.token_ids == after.token_ids and before.logprobs.tobytes() == after.logprobs.tobytes()


def heads_of(llm, layer):
    return runner_of(llm).model.module.model.layers[layer].self_attn.kv_b_proj._head_groups
