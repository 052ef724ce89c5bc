"""Speculation changes no token, log-prob, rank, seed or end: every request twice, with drafts and without."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import assert_clean
from rollout_engine.testing.architectures import SIZES

EXACT = ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral", "gemma3_text", "gpt_neox", "olmo2", "phi3"]
QUICK = [
    ("qwen3", torch.float32),
    pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", torch.bfloat16, marks=pytest.mark.slow),
]
RANKED = [
    ("qwen3", torch.float32),
    ("llama", torch.bfloat16),
    ("mixtral", torch.bfloat16),
    ("gemma3_text", torch.float32),
]
VOCAB_SIZE = 259
SOURCES = [("rollouts", "ngram"), ("rollouts",), ("ngram",)]


class Pair:
    """Two engines of one checkpoint, of which one drafts wherever it has a draft."""

    def __init__(self, directory, rng, sources=SOURCES[0], *, num_ranks=1, **more):
        """`num_ranks`: of the engine that drafts. `more`: for `SpeculationConfig`."""
        block_size = rng.choice([1, 4, 16, 64])
        options = dict(
            model=str(directory),
            log_stats=False,
            max_model_len=256,
            block_size=block_size,
            num_kv_blocks=-(-rng.choice([260, 400, 2000]) // block_size),
            max_num_batched_tokens=rng.choice([33, 64, 500]),
            enable_prefix_caching=rng.random() < 0.7,
        )
        self.plain = LLM(**options)
        speculation = SpeculationConfig(sources=sources, max_draft_tokens=rng.choice([1, 3, 8]), **more)
        self.drafting = LLM(**options, speculation=speculation, tensor_parallel_size=num_ranks)
        core = self.drafting.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        self.drafts = core.stats.drafts

    def compare(self, prompts, params):
        """Generate by both; returns the number of tokens."""
        expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (self.plain, self.drafting))
        for one, two in zip(expected, found, strict=True):
            for a, b in zip(one.outputs, two.outputs, strict=True):
                assert describe(a) == describe(b)
        return sum(len(sample.token_ids) for each in found for sample in each.outputs)

    def close(self):
        for llm in (self.plain, self.drafting):
            assert_clean(llm.llm_engine)
            llm.shutdown()


def describe(sample):
    """All that a sample holds, but for times."""
    arrays = {
        name: getattr(sample, name) for name in ("logprobs", "kept_logprob_mass", "sampled_ranks", "top_logprobs")
    }
    raw = {
        name: repr(None if a is None else [x.tobytes() for x in (a if isinstance(a, tuple) else (a,))])
        for name, a in arrays.items()
    }
    return sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, sample.seed, raw


def draw_params(rng):
    max_tokens = rng.randint(1, 60)
    return dict(
        n=rng.choice([1, 1, 2, 4]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        temperature=rng.choice([0.0, 0.1, 0.5, 1.0]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        top_k=rng.choice([0, 0, 5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        logit_bias=rng.choice([None, None, {7: 3.0}]),
        bad_words=rng.choice([None, None, ["a"]]),
        stop=rng.choice([None, None, ["b", "cd"]]),
        stop_token_ids=rng.choice([None, list(range(100, 110))]),
        logprobs=rng.choice([None, 0, 3]),
        logprobs_mode=rng.choice(["tempered", "raw", "processed"]),
        seed=rng.randrange(1000),
    )


def draw_prompts(rng):
    start = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 17, 64]))]
    return [
        start + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 20]))] for _ in range(rng.randint(1, 4))
    ]


def run_round(directory, rng, num_rounds=4, num_ranks=1):
    """Tokens compared, drafted, and accepted. Every request comes three times, so that the last find right drafts."""
    pair = Pair(directory, rng, rng.choice(SOURCES), num_ranks=num_ranks)
    num_tokens = 0
    for _ in range(num_rounds):
        prompts, params = draw_prompts(rng), SamplingParams(**draw_params(rng))
        num_tokens += sum(pair.compare(prompts, params) for _ in range(3))
        if rng.random() < 0.3:
            model = AutoModelForCausalLM.from_pretrained(directory)
            with torch.no_grad():
                next(model.parameters()).mul_(1.001)
            for llm in (pair.plain, pair.drafting):
                llm.update_weights(model)
    drafted, accepted = sum(pair.drafts.num_drafted), sum(pair.drafts.num_accepted)
    pair.close()
    return num_tokens, drafted, accepted


@pytest.mark.parametrize(("architecture", "dtype"), QUICK)
def test_drafts_change_nothing(checkpoint, architecture, dtype):
    rng = random.Random(f"drafts {architecture}")
    counts = [run_round(checkpoint(architecture, dtype), rng) for _ in range(2)]
    _, drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > accepted > 100


@pytest.mark.slow
@pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
@pytest.mark.parametrize(("architecture", "dtype"), RANKED)
def test_ranks_that_draft_say_what_one_process_says_without(checkpoint, architecture, dtype):
    _, drafted, accepted = run_round(
        checkpoint(architecture, dtype), random.Random(f"ranks {architecture}"), num_ranks=2
    )
    assert drafted > accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("architecture", EXACT)
def test_drafts_change_nothing_in_100_000_tokens(checkpoint, architecture):
    rng = random.Random(f"many drafts {architecture}")
    num_tokens = 0
    while num_tokens < 10_000:
        dtype = rng.choice([torch.float32, torch.bfloat16])
        num_tokens += run_round(checkpoint(architecture, dtype), rng)[0]


def test_models_whose_rows_depend_on_each_other_do_not_draft(checkpoint, caplog):
    inexact = next(name for name in ("gpt2", "opt") if name in SIZES)
    options = dict(model=str(checkpoint(inexact)), log_stats=False, num_kv_blocks=64, max_model_len=64)
    with pytest.raises(ConfigError, match="speculation=.*not possible.*Use speculation='off'"):
        LLM(**options, speculation=SpeculationConfig())
    llm = LLM(**options, speculation="auto")
    assert "speculation='auto' is off" in caplog.text
    llm.shutdown()
