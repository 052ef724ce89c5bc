"""Every kind of request gives the same tokens and bits over every client; what is wrong is said, and nothing stays."""

import numpy as np
import pytest

from rollout_engine import LLM, RequestError, RolloutEngineError, SamplingParams
from tests.conformance.running import (
    ENDLESS,
    SHORT,
    bring_back,
    ended,
    in_flight,
    last_of,
    outputs_of,
    step_further,
    step_until,
    told,
    told_of_sample,
)

CHAT = [{"role": "user", "content": "hi"}]
PROMPTS = {
    "text": "hello",
    "token ids": [5, 6, 7],
    "array": np.array([5, 6, 7]),
    "text in a dict": {"prompt": "the quick brown fox", "add_special_tokens": False},
    "token ids in a dict": {"prompt_token_ids": [5, 6, 7], "cache_salt": "own"},
    "conversation": CHAT,
    "conversation in a dict": {"messages": CHAT, "continue_final_message": True},
}
PARAMS = {
    "seed": dict(seed=1),
    "greedy": dict(seed=12, temperature=0.0, logprobs=3),
    "n": dict(n=3, seed=-1),
    "stop string": dict(seed=2, max_tokens=80, stop=["a", "e", "\x00"], include_stop_str_in_output=True),
    "stop regex": dict(seed=3, max_tokens=80, stop_regex=["[x-z]"]),
    "stop ids": dict(seed=4, max_tokens=80, stop_token_ids=list(range(100, 130)), min_tokens=3),
    "truncated": dict(seed=5, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    "logprobs": dict(seed=6, logprobs=5, logprobs_mode="raw", prompt_logprobs=3),
    "states": dict(seed=6, n=2, entropy=True, return_hidden_states="all"),
    "all logprobs": dict(seed=7, logprobs=-1, prompt_logprobs=-1, max_tokens=4),
    "logprobs of ids": dict(seed=8, logprob_token_ids=[7, 3], logprobs_mode="processed"),
    "edited logits": dict(seed=9, presence_penalty=1.0, logit_bias={9: 2.0}, bad_words=["a"], repetition_penalty=1.2),
    "ids only": dict(seed=10, detokenize=False, ignore_eos=True),
    "truncated prompt": dict(seed=11, truncate_prompt_tokens=2),
    "support": dict(seed=13, return_support=True, top_k=9, top_p=0.9, bad_words=["a"], logprobs_mode="processed"),
    "thinking": dict(seed=13, thinking_budget=3, thinking_start="o", thinking_end="!)", logit_bias={81: 3.0}, n=2),
}
REFUSED = {
    "too long": ([5] * 40_000, {}, "max_model_len=32768"),
    "no room": ([5, 6], dict(max_tokens=40_000), "max_tokens=40000"),
    "empty": ([], {}, "prompt"),
    "outside the vocabulary": ([5, 999], {}, r"prompt_token_ids\[1\]=999"),
    "no prompt": (3.5, {}, "prompt"),
    "unknown field": ({"promt": "x"}, {}, "promt"),
    "bad conversation": ([{"role": "user"}], {}, "content|messages"),
    "bad value": ("x", dict(top_p=0), "top_p=0"),
    "unknown parameter": ("x", dict(max_token=3), "max_token"),
    "bad budget": ("x", dict(thinking_budget=1, thinking_end=""), "thinking_end"),
    "bad regex": ("x", dict(stop_regex=["("]), r"stop_regex\[0\]"),
    "bias outside the vocabulary": ("x", dict(logit_bias={999: 1.0}), "logit_bias"),
    "too large a support": ("x", dict(return_support=True, top_k=100, n=512, max_tokens=9000), "return_support=True"),
    "too many log-probs": ("x", dict(logprobs=-1, n=512, max_tokens=4000), "log-probs a request"),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=list(PROMPTS))
def test_every_kind_of_prompt_gives_the_same(engine, same, prompt):
    same(told(last_of(engine, prompt, SHORT)))


@pytest.mark.quick(6)
@pytest.mark.parametrize("params", PARAMS.values(), ids=list(PARAMS))
def test_every_sampling_parameter_gives_the_same(engine, same, params):
    same(told(last_of(engine, "hello", SamplingParams(**{"max_tokens": 16, "logprobs": 0} | params))))


def test_a_dict_of_parameters_will_do_and_none_are_the_defaults(engine, same):
    same(told(last_of(engine, "hello", {"max_tokens": 5, "seed": 3})))
    assert last_of(engine, "hello", {"max_tokens": 3, "ignore_eos": True}).outputs[0].finish_reason == "length"


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind_of_output", ["delta", "cumulative", "final_only"])
def test_outputs_on_the_way_add_up_to_the_same_end(engine, same, kind_of_output):
    params = SamplingParams(n=2, seed=4, max_tokens=60, logprobs=0, ignore_eos=True, output_kind=kind_of_output)
    outputs = outputs_of(engine, "hello", params)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    samples = [[s for output in outputs for s in output.outputs if s.index == index] for index in range(2)]
    if kind_of_output == "delta":
        texts = ["".join(part.text for part in parts) for parts in samples]
        tokens = [sum((part.token_ids for part in parts), []) for parts in samples]
    else:
        texts, tokens = ([getattr(parts[-1], name) for parts in samples] for name in ("text", "token_ids"))
        for parts in samples:
            assert all(b.token_ids[: len(a.token_ids)] == a.token_ids for a, b in zip(parts, parts[1:], strict=False))
    if kind_of_output == "final_only":
        assert len(outputs) == 1
    elif engine.frontend.client.needs_turns:  # the others hand on what has gathered meanwhile
        assert len(outputs) == 60
    same([texts, tokens])


def test_the_way_a_request_is_streamed_changes_no_token(engine):
    params = dict(n=2, seed=4, max_tokens=60, logprobs=0, ignore_eos=True)
    final, whole = (
        last_of(engine, "hello", SamplingParams(**params, output_kind=each)) for each in ("final_only", "cumulative")
    )
    assert told(final) == told(whole)


def test_a_seed_that_came_back_replays_its_sample(engine):
    params = SamplingParams(n=3, seed=8, max_tokens=16, logprobs=0)
    third = last_of(engine, "hello", params).outputs[2]
    again = last_of(engine, "hello", SamplingParams(seed=third.seed, max_tokens=16, logprobs=0)).outputs[0]
    assert told_of_sample(again)[1:] == told_of_sample(third)[1:]


def test_a_request_beside_others_gives_what_it_gives_alone(engine):
    alone = told(last_of(engine, "hello", SHORT))
    with in_flight(engine, "another"):
        ids = engine.add_requests(["hello"] * 4, SHORT)
        outputs = step_until(engine, lambda: not any(map(engine.is_unfinished, ids)))
    assert [told(output) for output in outputs if output.request_id in ids and output.finished] == [alone] * 4


def test_requests_of_a_lower_priority_number_begin_first(engine):
    params = SamplingParams(n=64, seed=1, max_tokens=3, ignore_eos=True)
    engine.pause_generation()
    for request_id, priority in (("last", 1), ("first", -1), ("second", 0)):
        engine.add_request(request_id, "hello", params, priority=priority)
    engine.resume_generation()
    outputs = step_until(engine, lambda: not engine.has_unfinished_requests())
    done = sorted((o for o in outputs if o.finished), key=lambda output: output.metrics.first_token_time)
    assert [output.request_id for output in done] == ["first", "second", "last"]


def test_an_aborted_request_ends_with_what_it_has(engine):
    with in_flight(engine) as request_id:
        engine.abort_request([request_id, "unknown"])
        sample = ended(engine)
        assert sample.finish_reason == "abort" and len(sample.token_ids) >= 3
        engine.abort_request(request_id)
    assert engine.step() == []


def test_a_discarded_request_ends_without_a_word(engine):
    with in_flight(engine) as request_id:
        engine.abort_request(request_id, discard=True)
        assert not engine.has_unfinished_requests() and engine.step() == []


def test_an_id_is_unique_among_open_requests_and_free_again_afterwards(engine):
    with in_flight(engine) as request_id:
        with pytest.raises(RequestError, match="request_id='in flight' is not allowed"):
            engine.add_request(request_id, "hello", SHORT)
        step_further(engine)
        engine.abort_request(request_id)
        assert ended(engine).finish_reason == "abort"
        engine.add_request(request_id, "hello", SHORT)
        assert ended(engine).finish_reason in ("stop", "length")
    for wrong in ("", 3):
        with pytest.raises(RequestError, match="request_id"):
            engine.add_request(wrong, "hello", SHORT)


@pytest.mark.quick(23)
@pytest.mark.parametrize("prompt, params, match", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_served_is_refused_in_the_same_words(engine, same, prompt, params, match):
    with pytest.raises(RequestError, match=match) as caught:
        last_of(engine, prompt, params)
    same((str(caught.value), caught.value.field, caught.value.bound))
    assert not engine.has_unfinished_requests()


@pytest.mark.quick(23)
@pytest.mark.parametrize("prompt, params, match", REFUSED.values(), ids=list(REFUSED))
def test_one_bad_prompt_refuses_a_batch_by_its_place_and_leaves_nothing_queued(engine, same, prompt, params, match):
    llm = LLM.from_engine(engine)
    with pytest.raises(RequestError, match=match) as caught:
        llm.generate([[5], prompt, [6]], [SHORT, params or SHORT, SHORT], use_tqdm=False)
    assert "[1]" in str(caught.value)
    same(str(caught.value))
    assert len(engine.frontend.streams) == engine.check_health().num_unfinished_requests == 0


def test_what_the_core_refuses_is_an_error_of_the_request_that_leaves_nothing(engine, same):
    engine.sleep(level=2)
    engine.wake_up()  # DIRTY
    found = []
    for add in (lambda: last_of(engine, "hello", SHORT), lambda: engine.add_requests(["a", "b"], SHORT)):
        with pytest.raises(RolloutEngineError, match="add_request: the live weights are incomplete") as caught:
            add()
            step_until(engine, lambda: False)
        found.append((type(caught.value).__name__, str(caught.value)))
    while engine.has_unfinished_requests():  # the other one's, where each is told by itself
        with pytest.raises(RolloutEngineError, match="add_request: the live weights are incomplete"):
            engine.step()
    same(found)
    bring_back(engine)


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_ends_finishes_or_freezes_what_is_in_flight(engine, mode):
    params = ENDLESS if mode != "wait" else SamplingParams(max_tokens=300, ignore_eos=True, seed=3)
    with in_flight(engine, params=params) as request_id:
        engine.pause_generation(mode=mode)
        engine.add_request("later", "hello", SHORT)
        sampled = num_sampled(engine)
        if mode == "keep":
            engine.step()
            assert engine.is_unfinished(request_id) and engine.check_health().num_unfinished_requests == 2
        else:
            sample = ended(engine)
            assert sample.finish_reason == {"abort": "abort", "wait": "length"}[mode]
            assert mode == "abort" or len(sample.token_ids) == 300
        assert num_sampled(engine) == sampled and engine.is_unfinished("later")
        engine.resume_generation()
        assert ended(engine, "later").finish_reason in ("stop", "length")
        if mode == "keep":
            step_further(engine)


def num_sampled(engine):
    """Tokens that the engine has sampled since its start."""
    return engine.stats.num_tokens_sampled


@pytest.mark.quick(1)
def test_a_frozen_request_goes_on_to_the_tokens_it_would_have_had(engine):
    params = SamplingParams(max_tokens=400, ignore_eos=True, seed=3, logprobs=0)
    whole = told_of_sample(last_of(engine, "hello", params).outputs[0])
    with in_flight(engine, params=params):
        engine.pause_generation(mode="keep", clear_cache=True)
        engine.sleep(level=1, mode="keep")
        engine.wake_up()
        engine.resume_generation()
        assert told_of_sample(ended(engine)) == whole
