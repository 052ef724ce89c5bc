"""Requests for more log-probs than can be held, or than a sampler tells, are refused at the door."""

import msgspec
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.request_checks import CoreConfig, check_request
from rollout_engine.text.input_processor import InputProcessor

VOCAB_SIZE = 150_000


def door(**options):
    return InputProcessor(None, **({"max_model_len": 4096, "vocab_size": VOCAB_SIZE} | options))


@pytest.mark.parametrize(
    "params, words",
    [
        (dict(logprobs=-1), "4086 tokens x 150000 ids = 612900000 log-probs. Give max_tokens=447 or less"),
        (dict(logprobs=-1, max_tokens=448), "must be at most 67108864 log-probs a request"),
        (dict(logprobs=-1, max_tokens=100, n=8), "n=8 x 100 tokens x 150000 ids"),
        (dict(logprobs=-1, max_tokens=1, n=500), "Give a smaller n"),
        (dict(logprob_token_ids=list(range(1000)), max_tokens=4000, n=20), "logprob_token_ids='1000 ids'"),
        (dict(prompt_logprobs=-1), None),
        (dict(logprobs=-1, max_tokens=447), None),
        (dict(logprobs=64, logprob_token_ids=[1]), None),
    ],
)
def test_the_number_of_log_probs_is_bounded_and_the_error_says_what_fits(params, words):
    made, prompt = SamplingParams(**params), [1] * 10
    if words is None:
        assert door().check(prompt, made).max_tokens
        return
    with pytest.raises(RequestError) as caught:
        door().check(prompt, made)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "asked, most, words",
    [
        (-1, 111, "112 prompt tokens x 150000 of the vocabulary = 16800000 log-probs. Give a shorter prompt, or "
                  "prompt_logprobs=1024 or less."),
        (1024, 16_384, "16385 prompt tokens x 1024 = 16778240 log-probs. Give a shorter prompt, or "
                       "prompt_logprobs=1023 or less."),
        (64, 262_144, "262145 prompt tokens x 64 = 16777280 log-probs. Give a shorter prompt, or "
                      "prompt_logprobs=63 or less."),
    ],
)  # fmt: skip
def test_more_log_probs_of_a_prompt_than_can_be_held_are_refused(asked, most, words):
    params, long = SamplingParams(prompt_logprobs=asked, max_tokens=1), door(max_model_len=1 << 20)
    assert len(long.check([1] * most, params).token_ids) == most
    with pytest.raises(RequestError) as caught:
        long.check([1] * (most + 1), params)
    assert f"must be at most 16777216 log-probs a prompt. {words}" in str(caught.value)
    assert caught.value.field == "prompt_logprobs"


def test_more_log_probs_than_the_vocabulary_has_are_refused():
    small = InputProcessor(None, max_model_len=4096, vocab_size=500)
    assert small.check([1] * 9, SamplingParams(prompt_logprobs=500))
    with pytest.raises(RequestError, match="prompt_logprobs=501 is not allowed: must be at most 500, the vocabulary"):
        small.check([1] * 9, SamplingParams(prompt_logprobs=501))


def test_the_core_checks_again():
    config = CoreConfig(
        **dict.fromkeys(("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"), 64),
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
    )

    def check(vocab_size=VOCAB_SIZE, **params):
        request = EngineCoreRequest(
            prompt_token_ids=[1] * 90, params=SamplingParams(**params), max_tokens=4000, seed=0, first_sequence_id=0
        )
        check_request(request, msgspec.structs.replace(config, vocab_size=vocab_size))

    with pytest.raises(RequestError, match="log-probs a request"):
        check(logprobs=-1)
    with pytest.raises(RequestError, match=r"logprob_token_ids\[0\]=150000"):
        check(logprob_token_ids=[VOCAB_SIZE])
    with pytest.raises(RequestError, match="prompt_logprobs=-1 .* 90 prompt tokens x 200000"):
        check(vocab_size=200_000, prompt_logprobs=-1)
    with pytest.raises(RequestError, match="prompt_logprobs=501 is not allowed: must be at most 500"):
        check(vocab_size=500, prompt_logprobs=501)


@pytest.mark.parametrize("params", [dict(logprobs=-1), dict(logprob_token_ids=[3])])
def test_a_device_says_that_it_tells_the_most_likely_only(params):
    with pytest.raises(RequestError, match="must be absent with device='cuda'"):
        door(gives_id_logprobs=False).check([1], SamplingParams(max_tokens=1, **params))
    assert door(gives_id_logprobs=False).check([1], SamplingParams(logprobs=5, logprob_token_ids=[]))


@pytest.mark.parametrize(
    "params", [dict(logprobs=-2), dict(prompt_logprobs=-2), dict(logprob_token_ids=[-1]), dict(logprobs=65)]
)
def test_counts_and_ids_out_of_bounds_are_refused(params):
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="logprob_token_ids=150000 is not allowed: must be ids in"):
        door().check([1], SamplingParams(logprob_token_ids=[VOCAB_SIZE]))
