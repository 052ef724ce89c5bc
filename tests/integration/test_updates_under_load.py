"""Updates while an engine is busy: every token is its version's own, none is lost, and recomputed KV is exact."""

import threading
import time

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import assert_clean, spelled_token, spelling_state_dict, tiny_checkpoint, tiny_model

PROMPT = [5, 6, 7, 8, 9, 12]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def assert_spelled(output, params):
    """Exactly the tokens asked for, each in one span, each what its version says."""
    assert len(output.token_ids) == params.max_tokens
    assert [span.start for span in output.version_spans] == [0, *(span.end for span in output.version_spans[:-1])]
    assert output.version_spans[-1].end == params.max_tokens
    for span in output.version_spans:
        assert set(output.token_ids[span.start : span.end]) == {spelled_token(span.policy_version)}, span


def spell(llm, num_updates):
    """Push `num_updates` versions from another thread while requests run; returns how many versions were seen.

    The next is pushed at any moment after a step under the last one.
    """
    model, failures = tiny_model(), []
    llm.update_weights(spelling_state_dict(model, llm.policy_version + 1))
    stop, failed = threading.Event(), threading.Event()

    def push():
        try:
            for _ in range(num_updates):
                source = spelling_state_dict(model, llm.policy_version + 1)
                llm.update_weights(source, kv="recompute", staging="shadow")
                num_steps = llm.llm_engine.stats.num_steps
                while llm.llm_engine.stats.num_steps == num_steps and not failed.is_set():
                    time.sleep(0.0001)
        except Exception as problem:
            failures.append(problem)
        finally:
            stop.set()

    pusher = threading.Thread(target=push)
    pusher.start()
    params, seen = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True), set()
    try:
        while not stop.is_set():
            for result in llm.generate([PROMPT, PROMPT[:3], PROMPT[2:]], params, use_tqdm=False):
                assert_spelled(result.outputs[0], params)
                seen.update(span.policy_version for span in result.outputs[0].version_spans)
    except BaseException:
        failed.set()
        raise
    pusher.join()
    assert not failures
    assert_clean(llm.llm_engine)
    return len(seen)


def test_twenty_updates_under_load_and_every_token_spells_its_version(checkpoint):
    with LLM(checkpoint, num_kv_blocks=128, num_threads=1, log_stats=False) as llm:
        assert spell(llm, 20) >= 20
        assert llm.policy_version == 21


@pytest.mark.slow
def test_a_thousand_updates_under_load_and_every_token_spells_its_version(checkpoint):
    with LLM(checkpoint, num_kv_blocks=128, num_threads=1, log_stats=False) as llm:
        assert spell(llm, 1000) >= 1000
        assert llm.policy_version == 1001


def run_with_update(checkpoint, source, after, **options):
    """One request's output, with an update after so many tokens."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=7, logprobs=0)
    with LLM(checkpoint, num_kv_blocks=128, num_threads=1, log_stats=False) as llm:
        engine = llm.llm_engine
        engine.add_request("a", PROMPT, params)
        outputs = [engine.step() for _ in range(after)]
        report = engine.update_weights(source, **options)
        while engine.has_unfinished_requests():
            outputs.append(engine.step())
        return outputs[-1][-1].outputs[0], report


def fresh(checkpoint, source, output, start):
    """What an engine that always had these weights samples after the first `start` tokens."""
    params = SamplingParams(max_tokens=40 - start, ignore_eos=True, seed=output.seed, logprobs=0)
    with LLM(checkpoint, num_kv_blocks=128, num_threads=1, log_stats=False) as llm:
        llm.update_weights(source)
        (result,) = llm.generate([[*PROMPT, *output.token_ids[:start]]], params, use_tqdm=False)
        return result.outputs[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_after_recompute_tokens_and_logprobs_equal_a_fresh_engines_bit_for_bit(checkpoint, staging):
    source = tiny_model(seed=1).state_dict()
    output, report = run_with_update(checkpoint, source, 15, kv="recompute", staging=staging)
    old, new = output.version_spans
    assert (new.start, new.policy_version, new.kv_min_version) == (15, 1, 1)
    expected = fresh(checkpoint, source, output, new.start)
    assert output.token_ids[new.start :] == expected.token_ids
    assert np.array_equal(output.logprobs[new.start :], expected.logprobs)
    assert (report.num_in_flight, report.staging) == (1, staging)


def test_an_aborted_request_resumes_to_the_tokens_of_recompute(checkpoint):
    source = tiny_model(seed=1).state_dict()
    whole, _ = run_with_update(checkpoint, source, 15, kv="recompute")
    ended, report = run_with_update(checkpoint, source, 15, mode="abort")
    assert (ended.finish_reason, report.num_in_flight) == ("abort", 0)
    assert ended.token_ids == whole.token_ids[:15]
    assert fresh(checkpoint, source, ended, 15).token_ids == whole.token_ids[15:]


def test_with_wait_requests_finish_under_the_old_weights(checkpoint):
    source = tiny_model(seed=1).state_dict()
    output, report = run_with_update(checkpoint, source, 15, mode="wait")
    assert [(span.end, span.policy_version) for span in output.version_spans] == [(40, 0)]
    assert report.num_in_flight == 0


def test_prompts_match_blocks_of_their_version_alone(checkpoint):
    prompt, params = list(range(3, 60)), SamplingParams(max_tokens=2, ignore_eos=True)

    def cached(llm):
        return llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens

    with LLM(checkpoint, num_kv_blocks=128, num_threads=1, log_stats=False) as llm:
        assert (cached(llm), cached(llm)) == (0, 48)
        with torch.no_grad():
            llm.update_weights(tiny_model(seed=1))
        assert (cached(llm), cached(llm)) == (0, 48)
