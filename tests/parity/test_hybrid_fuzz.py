"""Layers that keep a state: no bit differs from the trainer's over many tokens, whatever the engine did.

    HYBRID_FUZZ_TOKENS=20000 python -m pytest tests/parity/test_hybrid_fuzz.py -m slow -s

Each round draws an engine (chunks of 1 to 512 tokens, blocks, pools of blocks and states so small that requests are
preempted, prefix caching, drafts, threads), prompts with shared beginnings, several samples of each, and updates of the
weights while requests are in flight, after which their KV and states are computed anew. Every log-prob is compared with
that of a trainer which has the weights of the version that sampled it. No tolerance anywhere.
"""

import os
import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, SpeculationConfig, exact
from rollout_engine.testing import assert_clean
from rollout_engine.testing.architectures import HYBRID_SIZES
from tests.parity.test_bits import DTYPES, draw_engine, draw_prompts
from tests.parity.versions import compare

NUM_TOKENS = int(os.environ.get("HYBRID_FUZZ_TOKENS", "1000"))
"""Log-probs that are compared for each model and dtype."""
NUM_VERSIONS = 2
"""Different weights that updates bring, in turn."""

pytestmark = [pytest.mark.usefixtures("own_products"), pytest.mark.slow]


class Weights:
    """Trainers with different weights of one model, in the order of the versions."""

    def __init__(self, checkpoint, name, dtype):
        sizes = HYBRID_SIZES[name]
        self.directories = [checkpoint(name, dtype, seed=seed, **sizes) for seed in range(NUM_VERSIONS)]
        self._trainers = [exact.enable(AutoModelForCausalLM.from_pretrained(each)) for each in self.directories]

    def of(self, version):
        return self._trainers[version % NUM_VERSIONS]


def run_round(weights, rng, dtype):
    """Counts of what happened in one engine, and of log-probs compared and wrong."""
    options = draw_engine(rng)
    options |= dict(
        max_num_batched_tokens=rng.choice([1, 7, 33, 64, 512]),
        state_cache_bytes=rng.choice([None, 0, 1 << 14, 1 << 18]) if options["enable_prefix_caching"] else None,
        dtype=str(dtype)[6:],
    )
    if rng.random() < 0.5:  # requests are preempted
        options |= dict(num_kv_blocks=-(-260 // options["block_size"]), max_num_seqs=20)
    options["max_num_seqs"] = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    drafts = rng.random() < 0.5 and options["max_num_batched_tokens"] > 1
    if drafts:
        speculation = SpeculationConfig(max_draft_tokens=rng.choice([1, 3, 8]))
        options |= dict(speculation=speculation, async_scheduling=False)
    temperature, counts = rng.choice([1.0, 0.7, 0.3]), Counter()
    with LLM(str(weights.directories[0]), deterministic=True, log_stats=False, **options) as llm:
        core, outputs = llm.frontend.client.driver.core, []
        if drafts:
            core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        requests = draw_requests(rng, temperature)
        for part in range(2):  # the second finds prefixes of the first, if no update is between, and drafts are right
            outputs += generate(llm.llm_engine, weights, rng, f"{part}", requests, counts)
        counts.update(
            preempted=core.stats.num_preemptions,
            cached=core.stats.num_cached_tokens,
            drafted_right=sum(core.stats.drafts.num_accepted),
            drafted=sum(core.stats.drafts.num_drafted),
        )
        assert_clean(llm.llm_engine)
    torch.set_num_threads(rng.choice([1, 2]))
    compare(outputs, lambda version: weights.of(version % NUM_VERSIONS), temperature, counts)
    return counts


def draw_requests(rng, temperature):
    """Prompts, and settings of each."""
    params = SamplingParams(temperature=temperature, logprobs=0, ignore_eos=True)

    def settings():
        return params.clone(max_tokens=rng.choice([8, 40, 70]), n=rng.choice([1, 2, 5]), seed=rng.randrange(1000))

    return [(prompt, settings()) for prompt in draw_prompts(rng)]


def generate(engine, weights, rng, prefix, requests, counts):
    """Outputs of requests, between whose steps the weights may change."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"{prefix}-{index}", {"prompt_token_ids": prompt}, params)
    updates = {rng.randrange(2, 60) for _ in range(rng.choice([0, 0, 1, 2]))}
    outputs, step = [], 0
    while engine.has_unfinished_requests():
        if step in updates:
            engine.update_weights(weights.of(engine.policy_version + 1), kv="recompute")
            counts["updates"] += 1
        outputs += [output for output in engine.step() if output.finished]
        step += 1
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", HYBRID_SIZES)
def test_no_bit_differs_from_the_trainer_through_updates_in_flight(checkpoint, name, dtype):
    weights, rng, counts = Weights(checkpoint, name, dtype), random.Random(f"{name} {dtype}"), Counter()
    while counts["compared"] < NUM_TOKENS:
        counts.update(run_round(weights, rng, dtype))
        print(f"{name} {dtype}: {dict(counts)}", flush=True)
        assert counts["wrong"] == 0, f"{counts['wrong']} of {counts['compared']} log-probs differ"
