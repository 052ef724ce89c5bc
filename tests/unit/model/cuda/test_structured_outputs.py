"""Structured outputs on a device: tokens are drawn there, and again on the host where a grammar refuses them."""

import pytest
import regex

from rollout_engine import SamplingParams
from rollout_engine.model.cuda import host_draws
from tests.unit.model.cuda.test_engine import assert_outputs_alike, complete

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
LETTERS, TEXT = r"[a-m]{2,9}", r"(.|\n)*"


@pytest.fixture
def rows_on_host(monkeypatch):
    """How many rows each draw on the host had."""
    counts, sample = [], host_draws.sample

    def counted(logits, *args):
        counts.append(len(logits))
        return sample(logits, *args)

    monkeypatch.setattr(host_draws, "sample", counted)
    return counts


def form(pattern, **settings):
    settings = {"logprobs": 1, "max_tokens": 4} | settings
    return SamplingParams(structured_outputs={"regex": pattern}, **settings)


@pytest.mark.slow
def test_tokens_are_those_of_the_cpu(engine_on):
    params = [
        form(LETTERS, seed=1),
        form(LETTERS, seed=2, logprobs_mode="processed"),
        form(LETTERS, seed=3, top_p=0.9, logprobs_mode="processed"),
        form(LETTERS, temperature=0.0),
        SamplingParams(seed=4, max_tokens=4, logprobs=1, ignore_eos=True),
        form(LETTERS, seed=5, presence_penalty=1.0),
        form(LETTERS, seed=6, top_k=5, temperature=0.7),
    ]
    prompts = [[7 + i, 8, 9] for i in range(len(params))]
    ours, theirs = (
        complete(engine_on(place, skip_tokenizer_init=False), params, prompts) for place in ("device", "cpu")
    )
    assert_outputs_alike(ours, theirs)
    for place, (_, sample) in enumerate(ours):
        assert place == 4 or regex.fullmatch(LETTERS, sample.text, partial=True)


@pytest.mark.slow
def test_only_rows_that_a_grammar_refuses_are_drawn_on_the_host(engine_on, rows_on_host):
    llm, prompts = engine_on("device", skip_tokenizer_init=False), [[7, 8, 9], [20, 21]]
    complete(llm, [form(TEXT, seed=seed) for seed in (1, 2)], prompts)
    few = sum(rows_on_host)  # of eight; half of all bytes begin no character
    rows_on_host.clear()
    outputs = complete(llm, [form("[a-b]{9}", seed=seed) for seed in (1, 2)], prompts)
    assert few < 7 <= sum(rows_on_host) <= 8
    assert all(set(sample.text) <= {"a", "b"} for _, sample in outputs)
