"""A draft model changes no token, log-prob, rank, seed or end, whatever it is: every request with it and without."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import SamplingParams
from rollout_engine.kernels.cpu import turns
from tests.parity.test_speculation import Pair, draw_params, draw_prompts

KINDS = ("copy", "noisy", "random")


@pytest.fixture(scope="module")
def drafter(checkpoint, tmp_path_factory):
    """drafter(kind, architecture, dtype) -> directory of a draft model for that checkpoint."""

    def make(kind, architecture, dtype):
        target = checkpoint(architecture, dtype)
        if kind == "copy":
            return target
        if kind == "random":
            return checkpoint("llama" if architecture == "qwen3" else "qwen3", torch.float32, num_hidden_layers=1)
        model = AutoModelForCausalLM.from_pretrained(target)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype) * weight.std() * 0.02)
        directory = tmp_path_factory.mktemp("noisy")
        model.save_pretrained(directory)
        return str(directory)

    return make


class DraftModelPair(Pair):
    """Two engines of one checkpoint, of which one has a draft model, which drafts wherever it may."""

    def __init__(self, directory, draft_model, rng, sources=(), **more):
        super().__init__(directory, rng, sources, draft_model=str(draft_model), **more)
        self.model = self.drafting.frontend.client.driver.core.draft_model
        self.model._costs.of = lambda num_rows: 1.0
        self.model._draft_costs.of = lambda num_rows: 1e-6

    @property
    def accepted(self):
        """Share of the drafted tokens that were right."""
        return sum(self.drafts.num_accepted) / max(sum(self.drafts.num_drafted), 1)

    def close(self):
        assert not self.model.is_off, "the draft model has failed"
        self.model._model.check_integrity()
        super().close()


def run_round(directory, draft_model, rng, num_rounds=4, num_ranks=1):
    """Tokens compared, drafted, and accepted."""
    sources = rng.choice([(), (), ("rollouts", "ngram")])
    pair = DraftModelPair(directory, draft_model, rng, sources, num_ranks=num_ranks)
    num_tokens = 0
    for _ in range(num_rounds):
        prompts, params = draw_prompts(rng), SamplingParams(**draw_params(rng))
        num_tokens += sum(pair.compare(prompts, params) for _ in range(2))
        if rng.random() < 0.3:
            model = AutoModelForCausalLM.from_pretrained(directory)
            with torch.no_grad():
                next(model.parameters()).mul_(1.001)
            for llm in (pair.plain, pair.drafting):
                llm.update_weights(model, kv=rng.choice(["keep", "recompute"]))
    drafted, accepted = sum(pair.drafts.num_drafted), sum(pair.drafts.num_accepted)
    pair.close()
    return num_tokens, drafted, accepted


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("architecture", "dtype", "kind"),
    [
        *(("qwen3", torch.float32, kind) for kind in KINDS),
        *(pytest.param("llama", torch.bfloat16, kind, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_a_draft_model_changes_nothing(checkpoint, drafter, architecture, dtype, kind):
    rng = random.Random(f"draft model {architecture} {kind}")
    draft_model = drafter(kind, architecture, dtype)
    _, drafted, accepted = run_round(checkpoint(architecture, dtype), draft_model, rng)
    assert drafted >= accepted > (50 if kind == "copy" else 10 if kind == "noisy" else -1)


@pytest.mark.slow
@pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
def test_a_draft_model_beside_ranks_changes_nothing(checkpoint, drafter):
    """It runs whole, beside rank 0."""
    draft_model = drafter("noisy", "qwen3", torch.float32)
    _, drafted, accepted = run_round(
        checkpoint("qwen3", torch.float32), draft_model, random.Random("ranks"), num_ranks=2
    )
    assert drafted >= accepted > 10


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "qwen3_moe", "gemma3_text", "gpt_neox"])
def test_a_draft_model_changes_nothing_in_many_tokens(checkpoint, drafter, architecture):
    rng = random.Random(f"many draft models {architecture}")
    num_tokens = 0
    while num_tokens < 5_000:
        dtype = rng.choice([torch.float32, torch.bfloat16])
        draft_model = drafter(rng.choice(KINDS), architecture, dtype)
        num_tokens += run_round(checkpoint(architecture, dtype), draft_model, rng)[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_copy_of_the_model_drafts_the_very_tokens(checkpoint, drafter, temperature):
    """At temperature 1 too, over some 250 tokens of almost equal probability: it draws with the same numbers."""
    directory = checkpoint("qwen3", torch.float32)
    pair = DraftModelPair(directory, drafter("copy", "qwen3", torch.float32), random.Random(0))
    pair.compare([[5, 6, 7, 8]], SamplingParams(max_tokens=100, temperature=temperature, ignore_eos=True, seed=3, n=3))
    assert pair.accepted > 0.99 and sum(pair.drafts.num_drafted) > 100
    pair.close()


def test_edits_are_drafted_as_the_model_draws(checkpoint, drafter):
    """Penalties, biases, bad words and the end id before `min_tokens`: of a copy of the model each draft is right."""
    directory = checkpoint("qwen3", torch.float32)
    pair = DraftModelPair(directory, drafter("copy", "qwen3", torch.float32), random.Random(0))
    params = SamplingParams(
        max_tokens=60, min_tokens=60, seed=3, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 3.0},
        bad_words=["a"], top_p=0.9, top_k=40,
    )  # fmt: skip
    pair.compare([[5, 6, 7, 8], [9, 9, 9]], params)
    assert pair.accepted > 0.99 and sum(pair.drafts.num_drafted) > 60
    pair.close()


def test_a_sample_that_is_aborted_leaves_no_kv_of_the_draft_model(checkpoint, drafter):
    directory = checkpoint("qwen3", torch.float32)
    pair = DraftModelPair(directory, drafter("copy", "qwen3", torch.float32), random.Random(0))
    engine = pair.drafting.llm_engine
    engine.add_request("gone", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True, n=2))
    for _ in range(10):
        engine.step()
    assert pair.model._model._known
    engine.abort_request("gone")
    while engine.has_unfinished_requests():
        engine.step()
    assert not pair.model._model._known
    pair.compare([[5, 6, 7]], SamplingParams(max_tokens=30, seed=1))
    pair.close()
