"""Budgets of thinking on a device: the same tokens as on the CPU are forced, and the host draws only if one may be."""

import pytest

from rollout_engine import SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.model.cuda import host_draws
from tests.unit.model.cuda.test_engine import assert_outputs_alike, complete

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:overflow encountered:RuntimeWarning",
        "ignore:invalid value encountered:RuntimeWarning",
        "ignore:divide by zero encountered in log:RuntimeWarning",
    ),
]
BRACKETS = dict(thinking_start="(", thinking_end="))", logprobs=1, max_tokens=8, ignore_eos=True, thinking_budget=2)
DRAFTS = dict(deterministic=True, speculation=SpeculationConfig(), async_scheduling=False)
PROMPTS = [[7, 8, 10], [7, 8, 9], [20, 10], [10, 30]]  # "(" is 10


@pytest.fixture
def rows_on_host(monkeypatch):
    """How many rows each draw on the host had."""
    counts, sample = [], host_draws.sample

    def counted(logits, *args):
        counts.append(len(logits))
        return sample(logits, *args)

    monkeypatch.setattr(host_draws, "sample", counted)
    return counts


@pytest.mark.parametrize("options", [{}, DRAFTS], ids=["plain", "drafts"])
def test_forced_tokens_are_those_of_the_cpu(engine_on, options):
    params = [
        SamplingParams(seed=1, **BRACKETS),
        SamplingParams(seed=2, logit_bias={10: 8.0}, **BRACKETS),
        SamplingParams(seed=3, presence_penalty=1.0, top_p=0.9, temperature=0.7, **BRACKETS),
        SamplingParams(seed=4, min_tokens=2, **(BRACKETS | {"thinking_budget": 0})),
    ]
    ours, theirs = (
        complete(engine_on(place, skip_tokenizer_init=False, **options), params, PROMPTS) for place in ("device", "cpu")
    )
    assert_outputs_alike(ours, theirs)
    forced = [sample.forced.tolist() for _, sample in ours]
    assert forced == [sample.forced.tolist() for _, sample in theirs]
    assert all(map(any, forced))
    assert ours[0][1].token_ids[2:4] == [11, 11]


def test_the_host_draws_no_row_before_the_budget_is_spent(engine_on, rows_on_host):
    params = [SamplingParams(seed=1, **BRACKETS), SamplingParams(seed=1, **(BRACKETS | {"thinking_budget": 100}))]
    complete(engine_on("device", skip_tokenizer_init=False), params, PROMPTS[:2])
    assert sum(rows_on_host) == 2  # the two tokens that are forced
