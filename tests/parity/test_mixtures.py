"""Mixtures of experts of every kind: no bit differs from the trainer's over many tokens, whatever the engine did.

    MIXTURE_FUZZ_TOKENS=20000 python -m pytest tests/parity/test_mixtures.py -m slow -s

Each round draws an engine (blocks, chunks, a pool so small that requests are preempted, prefix caching), prompts with
shared prefixes, and updates of the weights while requests are in flight, after which their KV is computed anew. Every
log-prob is compared with that of a trainer which has the weights of the version that sampled it. No tolerance anywhere.
"""

import os
import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, ConfigError, RequestError, RolloutPolicy, SamplingParams, exact
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import assert_clean, random_adapter, tiny_model
from rollout_engine.testing.architectures import sizes_of
from tests.parity import test_speculation
from tests.parity.test_bits import DTYPES, draw_engine, draw_prompts
from tests.parity.versions import compare
from tests.unit.peft_layers import PeftModel

NUM_TOKENS = int(os.environ.get("MIXTURE_FUZZ_TOKENS", "1000"))
"""Log-probs that are compared for each model and dtype."""
NAMES = (
    "deepseek_v2 deepseek_v3_one_group deepseek_v3_eight_groups glm4_moe glm4_moe_lite minimax_m2 mimo_v2_flash hy_v3 "
    "qwen2_moe gpt_oss gemma4_text gemma4_text_own_kv gemma4_text_experts ernie4_5_moe phimoe longcat_flash"
).split()
NUM_VERSIONS = 3
"""Different weights that updates bring, in turn."""

pytestmark = [pytest.mark.usefixtures("own_products"), pytest.mark.slow]


class Weights:
    """Trainers with different weights of one model, in the order of the versions."""

    def __init__(self, sized_checkpoint, name, dtype):
        self.directories = [sized_checkpoint(name, dtype, seed=seed) for seed in range(NUM_VERSIONS)]
        self._trainers = [exact.enable(AutoModelForCausalLM.from_pretrained(each)) for each in self.directories]

    def of(self, version):
        return self._trainers[version % NUM_VERSIONS]


def run_round(weights, rng, dtype, *, is_tight):
    """Counts of what happened in one engine, and of log-probs compared and wrong."""
    options = draw_engine(rng) | dict(max_num_seqs=rng.choice([5, 20, 64]), dtype=str(dtype)[6:])
    if is_tight:  # requests are preempted, and prefixes found
        options |= dict(num_kv_blocks=-(-260 // options["block_size"]), max_num_seqs=20, enable_prefix_caching=True)
    temperature = rng.choice([1.0, 0.7, 1.3])
    counts = Counter()
    with LLM(str(weights.directories[0]), deterministic=True, log_stats=False, **options) as llm:
        outputs = []
        for part in range(2):  # the second finds prefixes of the first, if no update is between
            outputs += generate(llm.llm_engine, weights, rng, f"{part}", temperature, counts)
        stats = llm.frontend.client.driver.core.stats
        counts.update(preempted=stats.num_preemptions, cached=stats.num_cached_tokens)
        assert_clean(llm.llm_engine)
    compare(outputs, weights.of, temperature, counts)
    return counts


def generate(engine, weights, rng, prefix, temperature, counts):
    """Outputs of drawn requests, between whose steps the weights change once or twice."""
    for index, prompt in enumerate(draw_prompts(rng)):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=rng.choice([8, 40, 70]),
            n=rng.choice([1, 2, 4]),
            logprobs=0,
            seed=rng.randrange(1000),
            ignore_eos=True,
        )
        engine.add_request(f"{prefix}-{index}", {"prompt_token_ids": prompt}, params)
    updates = {rng.randrange(2, 60) for _ in range(rng.choice([1, 2]))}
    outputs, step = [], 0
    while engine.has_unfinished_requests():
        if step in updates:
            source = weights.of(engine.policy_version + 1)
            engine.update_weights(source, kv="recompute", staging=rng.choice(["shadow", "inplace"]))
            counts["updates"] += 1
        outputs += [output for output in engine.step() if output.finished]
        step += 1
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_differs_from_the_trainer_through_updates_in_flight(sized_checkpoint, name, dtype):
    weights, rng, counts = Weights(sized_checkpoint, name, dtype), random.Random(f"{name} {dtype}"), Counter()
    while counts["compared"] < NUM_TOKENS:
        counts.update(run_round(weights, rng, dtype, is_tight=not counts))
    print(f"{name} {dtype}: {dict(counts)}")
    assert all(counts[each] for each in ("preempted", "cached", "across"))
    assert counts["wrong"] == 0, f"{counts['wrong']} of {counts['compared']} log-probs differ"


def play_drafts(directory, rng, num_accepted, num_ranks=1):
    """Rounds in which all requests are compared with those of an engine that does not draft; some find no drafts."""
    total = 0
    for _ in range(20):
        _, _, accepted = test_speculation.run_round(directory, rng, num_ranks=num_ranks)
        total += accepted
        if total > num_accepted:
            return
    raise AssertionError(f"only {total} drafted tokens were right")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text_experts", "deepseek_v3_eight_groups", "qwen2_moe"])
def test_drafts_change_nothing(sized_checkpoint, name, dtype):
    play_drafts(sized_checkpoint(name, dtype), random.Random(f"drafts {name} {dtype}"), num_accepted=100)


@pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text_experts", "longcat_flash"])
def test_ranks_that_draft_say_what_one_process_says_without(sized_checkpoint, name):
    directory = sized_checkpoint(name, torch.bfloat16)
    play_drafts(directory, random.Random(f"ranks {name}"), num_accepted=20, num_ranks=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt_oss", ("q_proj", "v_proj", "o_proj")),
        ("gemma4_text_experts", ("q_proj", "o_proj", "gate_proj", "down_proj")),
        ("qwen2_moe", ("k_proj", "up_proj", "down_proj")),
        ("longcat_flash", ("q_b_proj", "gate_proj", "down_proj")),
    ],
)
def test_adapters_are_exact(sized_checkpoint, name, targets, dtype):
    architecture, sizes = sizes_of(name)
    directory = sized_checkpoint(name, dtype)
    trainer = exact.enable(PeftModel(AutoModelForCausalLM.from_pretrained(directory), targets, rank=5))
    other = random_adapter(tiny_model(architecture, **sizes), "other", targets=targets)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    options = dict(dtype=str(dtype)[6:], deterministic=True, max_model_len=256)
    with RolloutPolicy.from_pretrained(directory, **options) as policy:
        policy.add_lora(trainer.request())
        policy.add_lora(other)
        batches = [
            policy.rollout(["abc", "x" * 70], params, num_samples=3, seed=1, lora_request=lora, use_tqdm=False)
            for lora in ("x", "other", None)
        ]
    places = [batch["masks", "all_assistant_mask"][:, 1:] for batch in batches]
    sampled = [batch["log_probs", "full"][:, 1:][place] for batch, place in zip(batches, places, strict=True)]
    ours = exact.token_logprobs(trainer, batches[0])
    assert torch.equal(ours[places[0]].detach(), sampled[0])
    ours.sum().backward()
    assert all(layer.lora_B["default"].weight.grad.any() for layer in trainer.adapters())
    for layer in trainer.adapters():
        layer.disable_adapters = True
    ids, mask = batches[2]["tokens", "full"], batches[2]["masks", "all_attention_mask"]
    assert torch.equal(exact.token_logprobs(trainer, ids, mask)[places[2]].detach(), sampled[2])
    ids, mask = batches[1]["tokens", "full"].clone(), batches[1]["masks", "all_attention_mask"]
    assert not torch.equal(exact.token_logprobs(trainer, ids, mask)[places[1]].detach(), sampled[1])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt_oss", "model.layers.0.mlp.router"),
        ("longcat_flash", "model.layers.0.mlp.router.classifier"),
    ],
)
def test_adapters_of_experts_and_of_matrices_that_only_routers_read_are_refused(sized_checkpoint, name, target):
    request = random_adapter(tiny_model("qwen3"), "x", targets=("q_proj",))
    tensors = {
        f"base_model.model.{target}.lora_{matrix}.weight": values
        for matrix, values in zip("AB", list(request.tensors.values())[:2], strict=True)
    }
    with LLM(str(sized_checkpoint(name)), log_stats=False) as llm:
        with pytest.raises(RequestError, match=f"target='{target}' is not allowed: must be a linear layer of"):
            llm.add_lora(request.__class__("x", tensors=tensors, config=request.config))


def test_experts_with_biases_are_not_rounded_to_int8(sized_checkpoint):
    with pytest.raises(ConfigError, match="quantization='int8' is not possible: .*mixture of experts"):
        LLM(str(sized_checkpoint("gpt_oss")), quantization="int8", num_kv_blocks=64)
