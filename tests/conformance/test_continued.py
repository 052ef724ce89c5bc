"""A sample goes on behind the tokens that another engine gave it, to the tokens and bits that it would have had."""

import msgspec
import pytest

from rollout_engine import RequestError, SamplingParams
from rollout_engine.base.seeds import child_seed
from tests.conformance.running import last_of, plain

PARAMS = {
    "drawn": dict(entropy=True),
    "greedy": dict(temperature=0.0, logprobs=3),
    "one of three": dict(n=3),
    "truncated": dict(top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    "penalties": dict(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={9: 2.0}),
    "bad words": dict(bad_words=["a", "bc"], logprobs_mode="processed"),
    "late end": dict(min_tokens=20, stop_token_ids=list(range(90, 130)), ignore_eos=False),
    "log-probs of ids": dict(logprob_token_ids=[7, 3]),
}
SELDOM_BROKEN = "greedy", "truncated", "bad words", "log-probs of ids"
PROMPT = list(range(5, 45))


@pytest.fixture
def continued(engine, monkeypatch):
    """The last output of a request whose sample `index` has `tokens` already."""

    def run(params, index, tokens):
        client = engine.frontend.client
        add = client.add_request

        def add_continued(request, route):
            seed = child_seed(request.seed, index)
            add(msgspec.structs.replace(request, seed=seed, output_token_ids=tokens), route)

        with monkeypatch.context() as patch:
            patch.setattr(client, "add_request", add_continued)
            return last_of(engine, PROMPT, params)

    return run


def bits(sample, start):
    """What a sample says of its tokens from `start` on, and of its end."""
    names = "token_ids logprobs kept_logprob_mass sampled_ranks token_id_logprobs entropies".split()
    columns = [getattr(sample, name) for name in names] + list(sample.top_logprobs or ())
    told = [None if column is None else plain(column[start:]) for column in columns]
    return told, sample.finish_reason, sample.stop_reason


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM_BROKEN)) for name in PARAMS]
)
def test_the_rest_of_a_sample_is_the_same(engine, continued, same, name):
    params = SamplingParams(
        **(dict(max_tokens=40, seed=8, logprobs=0, ignore_eos=True, detokenize=False) | PARAMS[name])
    )
    whole = last_of(engine, PROMPT, params).outputs
    found = []
    for index, sample in enumerate(whole):
        for start in (1, 15, len(sample.token_ids) - 1):
            one = params.clone(n=1)
            (rest,) = continued(one, index, sample.token_ids[:start]).outputs
            assert bits(rest, 0) == bits(sample, start)
            found.append(rest.token_ids)
    same(found)


def test_what_cannot_go_on_is_refused(engine, continued):
    params = SamplingParams(max_tokens=4, seed=8, detokenize=False)
    for given, tokens, said in [
        ({}, [5, 6, 7, 8], "output_token_ids='4 tokens'"),
        ({}, [5, 999], r"output_token_ids\[1\]=999"),
        (dict(n=2), [5], "n=2"),
        (dict(prompt_logprobs=1), [5], "prompt_logprobs=1"),
    ]:
        with pytest.raises(RequestError, match=said):
            continued(params.clone(**given), 0, tokens)


@pytest.mark.slow
def test_a_long_output_goes_on_too(engine, continued):
    params = SamplingParams(max_tokens=5010, seed=8, ignore_eos=True, detokenize=False)
    (whole,) = last_of(engine, PROMPT, params).outputs
    (rest,) = continued(params, 0, whole.token_ids[:5000]).outputs
    assert rest.token_ids == whole.token_ids[5000:]
