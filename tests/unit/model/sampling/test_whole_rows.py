"""Rows without rules or edits, which C++ draws from what is kept between steps."""

import weakref

import numpy as np
import pytest
import torch

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.draw import draw
from rollout_engine.kernels.rng import uniforms
from rollout_engine.kernels.row_stats import UniformsOf
from rollout_engine.model.sampling.sampler import BAD_LOGITS, sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

SEEDS = [3, 2**64 - 1, 7, 0, 11]
PARAMS = [SamplingParams(temperature=t, logprobs=0) for t in (1.0, 0.0, 0.5, 2.0, 1.0)]


def batch_at(position):
    return SamplingBatch.from_tasks(PARAMS, SEEDS, [position + i for i in range(len(SEEDS))])


def logits_of_steps():
    """Logits [5, V] as steps may give them: in place, elsewhere, of other dtypes, sizes and strides."""
    rng = torch.Generator().manual_seed(0)
    first = torch.randn(5, 300, generator=rng)
    yield first
    yield first.mul_(-1)
    yield torch.randn(5, 300, generator=rng)
    yield torch.randn(5, 300, generator=rng).bfloat16()
    yield torch.randn(5, 300, generator=rng).half()
    yield torch.randn(9, 400, generator=rng)[2:7, 50:350]
    yield torch.randn(300, 5, generator=rng).t()
    yield torch.randn(5, 128, generator=rng)
    yield torch.randn(5, 40_000, generator=rng)  # on several threads


def test_steps_draw_what_a_new_batch_draws():
    kept = batch_at(0)
    for step, logits in enumerate(logits_of_steps()):
        kept.positions = np.arange(step, step + 5)
        out, new = sample(logits, kept), batch_at(step)
        assert out == sample(logits, new)
        numbers = uniforms(*new.uniforms)
        stats, _ = draw(logits, new.row_temperatures, numbers, new.greedy)
        assert out.token_ids == stats.tokens.tolist() and out.logprobs == stats.logprobs.tolist()


@pytest.mark.parametrize("twin", [False, True])
def test_uniforms_may_be_given_by_what_they_depend_on(monkeypatch, twin):
    if twin:
        monkeypatch.setattr(build, "load_kernels", lambda: None)
    batch, logits = batch_at(9), torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    of = UniformsOf(torch.from_numpy(batch.seeds), torch.from_numpy(batch.positions))
    by_number, _ = draw(logits, batch.row_temperatures, uniforms(*of), batch.greedy)
    assert torch.equal(draw(logits, batch.row_temperatures, of, batch.greedy)[0].tokens, by_number.tokens)


def test_a_row_that_cannot_be_sampled_is_told_and_harms_no_step():
    kept, logits = batch_at(0), torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    before, broken = sample(logits, kept), logits.clone()
    broken[3, 7] = torch.nan
    out = sample(broken, kept)
    assert out.errors == {3: BAD_LOGITS} and out.token_ids[3] == -1
    assert [out.token_ids[row] for row in (0, 1, 2, 4)] == [before.token_ids[row] for row in (0, 1, 2, 4)]
    assert sample(logits, kept) == before


def test_logits_of_a_step_are_freed_with_it():
    kept, logits = batch_at(0), torch.randn(5, 300)
    freed = weakref.ref(logits)
    sample(logits, kept)
    del logits
    assert freed() is None


def test_results_of_a_step_outlast_the_next_one():
    kept, logits = batch_at(0), torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    before = sample(logits, kept)
    token_ids, logprobs = list(before.token_ids), list(before.logprobs)
    sample(-logits, kept)
    assert (before.token_ids, before.logprobs) == (token_ids, logprobs)
