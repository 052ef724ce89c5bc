"""Statistics of a step: what is counted of a batch, and of an engine between two steps."""

import math

import pytest
import torch

from rollout_engine import RequestError
from rollout_engine.base.metrics import CoreMetrics, CoreStats, EngineMetrics, RequestStats
from rollout_engine.base.outputs import CompletionOutput, RequestOutput, VersionSpan
from rollout_engine.base.provenance import RolloutNote, attach
from rollout_engine.batches.rollout_batch import rollout_batch
from rollout_engine.looking.statistics import EngineRates, batch_statistics

LOGPROBS = [[-0.5, -1.0, -1.5], [-2.0]]


def batch_of(layout="padded", rewards=((1.0, 0.0),)):
    """Two samples: three tokens of version 1, and one of version 3."""
    samples = [
        CompletionOutput(
            index=i,
            text="",
            token_ids=[5] * len(logprobs),
            logprobs=torch.tensor(logprobs).numpy(),
            top_logprobs=None,
            cumulative_logprob=sum(logprobs),
            kept_logprob_mass=None,
            finish_reason="length" if i else "stop",
            stop_reason=None,
            version_spans=[VersionSpan(0, len(logprobs), 1 + 2 * i, 1 + 2 * i)],
            seed=i,
        )
        for i, logprobs in enumerate(LOGPROBS)
    ]
    output = RequestOutput("0", "p", [1, 2], None, samples, True, 0)
    return rollout_batch(
        [output],
        pad_token_id=0,
        rewards=rewards,
        function_rewards={"exact": [[1.0, None]]} if rewards else None,
        layout=layout,
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_is_counted_alike_in_both_layouts(layout):
    found = batch_statistics(batch_of(layout), live_version=4)
    assert found == pytest.approx(
        {
            "tokens": 4,
            "length/mean": 2,
            "length/min": 1,
            "length/max": 3,
            "length/truncated": 0.5,
            "entropy": 1.25,
            "reward/mean": 0.5,
            "reward/min": 0,
            "reward/max": 1,
            "reward/std": 0.5,
            "reward/exact": 1.0,
            "staleness/mean": (3 * 3 + 1) / 4,
            "staleness/max": 3,
        }
    )


def test_staleness_is_to_the_weights_that_were_live_when_the_rollout_was_returned():
    batch = batch_of()
    attach(batch["tokens", "full"], RolloutNote("float32", 1.0, False, live_version=3))
    for now in (4, None):
        assert batch_statistics(batch, live_version=now)["staleness/max"] == 2


def test_what_a_batch_lacks_is_left_out():
    found = batch_statistics(batch_of(rewards=None))
    assert not [name for name in found if name.startswith(("reward", "staleness", "kl"))]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_divergence_is_of_sampled_tokens_and_zero_where_both_agree(layout, first):
    batch = batch_of(layout)
    logprobs = batch["log_probs", "full"].clone()
    assert batch_statistics(batch, trainer_logprobs=logprobs[:, first:])["kl"] == 0.0
    mask = batch["masks", "all_assistant_mask"]
    other = torch.where(mask, logprobs + math.log(2.0), torch.full_like(logprobs, 99.0))  # others do not count
    found = batch_statistics(batch, trainer_logprobs=other[:, first:])
    assert found["kl"] == pytest.approx(2 - 1 - math.log(2), rel=1e-5)
    assert found["kl/max_ratio"] == pytest.approx(2.0, rel=1e-5)


def test_log_probs_of_another_shape_are_refused():
    with pytest.raises(RequestError, match=r"trainer_logprobs.shape=\[1, 1\] is not allowed: must be \[2, 5\], or"):
        batch_statistics(batch_of(), trainer_logprobs=torch.zeros(1, 1))
    with pytest.raises(RequestError, match="trainer_logprobs.shape='list'"):
        batch_statistics(batch_of(), trainer_logprobs=[1.0])


def test_an_engine_is_measured_between_two_calls():
    counters, times = CoreStats(), iter([10.0, 14.0, 15.0])
    core = CoreMetrics(0, 0, 0, 0.25, 7, "RUNNING", counters)

    def read():
        copied = CoreStats(
            num_tokens_sampled=counters.num_tokens_sampled,
            num_looked_up_tokens=counters.num_looked_up_tokens,
            num_cached_tokens=counters.num_cached_tokens,
        )
        copied.updates.stall_seconds.observe(counters.last_pause_seconds)
        return EngineMetrics(
            CoreMetrics(0, 0, 0, core.cache_usage, core.policy_version, core.state, copied), RequestStats()
        )

    rates = EngineRates(read, lambda: next(times))
    counters.num_tokens_sampled, counters.num_looked_up_tokens, counters.num_cached_tokens = 40, 10, 5
    counters.last_pause_seconds = 0.5
    found = rates()
    assert found["seconds"] == 4 and found["engine/tokens_per_second"] == 10
    assert found["engine/stall_seconds"] == 0.5 and found["engine/cached_share"] == 0.5
    assert found["engine/policy_version"] == 7 and found["engine/cache_usage"] == 0.25
    again = rates()
    assert again["engine/tokens_per_second"] == 0 and again["engine/stall_seconds"] == 0
    assert "engine/cached_share" not in again  # nothing was looked up
