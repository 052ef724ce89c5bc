"""An engine that prepares the next step while one runs gives what one gives that does not, bit for bit."""

import numpy as np
import pytest

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import assert_clean, tiny_checkpoint, tiny_model

PROMPTS = ["hello", "ab", "the quick brown fox jumps over the lazy dog", list(range(3, 120))]
REQUESTS = {
    "plain": dict(n=3),
    "stopped by ids": dict(n=4, stop_token_ids=[*range(5, 240, 7)], min_tokens=2),
    "stopped by text": dict(n=3, stop=["a", "e", "1"]),
    "penalties": dict(n=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3, temperature=0.8),
    "masks": dict(n=2, bad_words=["a", "th", "qu"], logit_bias={7: 4.0, 9: 4.0}),
    "few tokens": dict(n=2, allowed_token_ids=[4, 5, 6], logprobs_mode="processed"),
    "truncation": dict(n=2, top_p=0.7, top_k=20, min_p=0.01),
    "prompt scored": dict(prompt_logprobs=2, logprobs=3),
    "greedy": dict(temperature=0.0),
    "processors": dict(n=2, extra_args={"favour": 5}),
}
TIGHT = dict(num_kv_blocks=26, max_num_seqs=5, max_num_batched_tokens=40, max_model_len=200)
"""So that requests are computed in parts, wait and are preempted."""


class Favour:
    """A logits processor: every third token is the one that the request names."""

    def __init__(self, vocab_size):
        pass

    def wants(self, params):
        return "favour" in (params.extra_args or {})

    def apply(self, logits, sequence):
        if len(sequence.token_ids) % 3 == 0:
            logits[sequence.params.extra_args["favour"]] += 50
        return logits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=["roomy", "tight"])
def pair(request, checkpoint):
    """The same engine twice: one step after the other, and prepared ahead."""
    options = dict(log_stats=False, num_threads=1, logits_processors=(f"{__name__}:Favour",))
    options |= TIGHT if request.param == "tight" else {"num_kv_blocks": 512}
    with (
        LLM(checkpoint, **options, async_scheduling=False) as one,
        LLM(checkpoint, **options, async_scheduling=True) as two,
    ):
        yield one, two


def told(outputs):
    """All that a user can see, and compare."""
    return [
        (
            sample.token_ids,
            sample.text,
            sample.finish_reason,
            sample.stop_reason,
            sample.seed,
            [(span.start, span.end, span.policy_version, span.kv_min_version) for span in sample.version_spans],
            *(None if c is None else np.asarray(c).tobytes() for c in (sample.logprobs, sample.kept_logprob_mass)),
            None if sample.top_logprobs is None else [column.tobytes() for column in sample.top_logprobs],
        )
        for output in outputs
        for sample in output.outputs
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", REQUESTS)
def test_every_kind_of_request_gets_the_same_bits(pair, kind):
    params = SamplingParams(**{"max_tokens": 24, "logprobs": 0, "seed": 11} | REQUESTS[kind])
    in_turn, ahead = (told(llm.generate(PROMPTS, params, use_tqdm=False)) for llm in pair)
    assert in_turn == ahead
    for llm in pair:
        assert_clean(llm.llm_engine)


def test_a_batch_of_all_kinds_gets_the_same_bits(pair):
    params = [SamplingParams(**{"max_tokens": 30, "logprobs": 0, "seed": 5} | each) for each in REQUESTS.values()]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    in_turn, ahead = (told(llm.generate(prompts, params, use_tqdm=False)) for llm in pair)
    assert in_turn == ahead
    for llm in pair:
        assert_clean(llm.llm_engine)


def test_weights_change_between_two_tokens_and_the_spans_say_which(checkpoint):
    params = SamplingParams(max_tokens=12, logprobs=0, seed=3, ignore_eos=True)
    with LLM(checkpoint, log_stats=False, async_scheduling=True) as llm:
        engine = llm.llm_engine
        engine.add_request("a", "hello", params)
        outputs = [*engine.step(), *engine.step()]
        engine.update_weights(tiny_model(seed=1), version=7)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (sample,) = outputs[-1].outputs
        assert [(s.start, s.end, s.policy_version) for s in sample.version_spans] == [(0, 3, 0), (3, 12, 7)]
        scored = llm.score([outputs[-1].prompt_token_ids], [sample.token_ids])[0]
    assert not np.array_equal(scored[:3], sample.logprobs[:3]), "the first tokens are of the old weights"


def test_calls_between_steps_find_the_model_at_rest(checkpoint):
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, n=4)
    with LLM(checkpoint, log_stats=False, async_scheduling=True) as llm:
        engine, thread = llm.llm_engine, llm.frontend.client.driver.executor._thread
        engine.add_request("a", PROMPTS[3], params)
        engine.step()
        assert thread._last is not None
        assert llm.apply_model(lambda module: thread._last) == [None]
        engine.step()
        assert thread._last is not None
        llm.score([[5, 6, 7]], [[8, 9]])
        assert thread._last is None
        while engine.has_unfinished_requests():
            engine.step()
        assert_clean(engine)
