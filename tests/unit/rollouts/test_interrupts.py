"""Ctrl-C before every line of a call: raised once, nothing left behind, and the next call gives right tokens."""

import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import rollout_engine
from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine import interrupts
from rollout_engine.faces.llm import LLM

OURS = str(Path(rollout_engine.__file__).parent)
PARAMS = SamplingParams(max_tokens=3, seed=5, ignore_eos=True, n=2, stop=["\x00never"])
PROMPTS = [[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 20]]


@contextmanager
def interrupt_before_line(number):
    """Ctrl-C before so many lines of the package have run; yields a list that holds what is left of the count."""
    left = [number]

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(OURS) or frame.f_code.co_name == "_on_signal":
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(None)


def sweep(call, check, stride):
    """Interrupt `call` before its lines 1, 1 + stride, ... until it ends before the interrupt comes."""
    number = 1
    while True:
        with interrupt_before_line(number) as left:
            try:
                call()
            except KeyboardInterrupt:
                assert left[0] <= 0
            else:
                assert left[0] > 0, f"line {number}: the interrupt was lost"
                return number
        check(number)
        number += stride


def tokens_of(batch):
    return batch["tokens", "full"].tolist()


def generated(llm):
    return [[s.token_ids for s in o.outputs] for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def rewards(prompts, completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def assert_nothing_left(rig, number):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"line {number}: a handler was left"
    assert not rig.engine.has_unfinished_requests(), f"line {number}: a request was left"
    rig.assert_clean()


STRIDES = [pytest.param(1, marks=pytest.mark.slow), 61]


@pytest.mark.parametrize("stride", STRIDES)
def test_generate_may_be_interrupted_before_any_line(make_rig, stride):
    rig = make_rig()
    llm = LLM.from_engine(rig.engine)
    expected = generated(llm)

    def check(number):
        assert_nothing_left(rig, number)
        assert generated(llm) == expected, f"line {number}: the next call samples other tokens"

    assert sweep(lambda: generated(llm), check, stride) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("stride", STRIDES)
def test_a_rollout_may_be_interrupted_before_any_line(make_rig, stride):
    rig = make_rig()

    def roll():
        return tokens_of(rig.rollout(PROMPTS, PARAMS, reward_fn=rewards))

    expected = roll()

    def check(number):
        assert_nothing_left(rig, number)
        assert roll() == expected, f"line {number}: the next call samples other tokens"

    assert sweep(roll, check, stride) > 1000


@pytest.mark.parametrize("stride", STRIDES)
def test_a_loop_of_steps_may_be_interrupted_before_any_line_and_gets_every_result_once(make_rig, stride):
    rig = make_rig()
    expected = generated(LLM.from_engine(rig.engine))
    number, beyond = 1, False
    while not beyond:
        ids = rig.engine.add_requests(PROMPTS, SamplingParams.clone(PARAMS, output_kind="final_only"))
        results = []
        with interrupt_before_line(number) as left:
            while len(results) < 2:
                try:
                    while rig.engine.has_unfinished_requests():
                        results += rig.engine.step()
                except KeyboardInterrupt:
                    rig.core.check_integrity()
        beyond = left[0] > 0
        found = {result.request_id: [s.token_ids for s in result.outputs] for result in results}
        assert len(results) == 2, f"line {number}: {len(results)} results"
        assert [found[name] for name in ids] == expected, f"line {number}: other tokens"
        assert_nothing_left(rig, number)
        number += stride
    assert number > 1000


def test_an_engine_that_was_interrupted_twice_in_a_step_is_not_used_again(make_rig, monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.0)
    rig = make_rig()

    def hang():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt was held back")

    rig.executor.before_step = hang
    with pytest.raises(KeyboardInterrupt):
        rig.rollout()
    with pytest.raises(LifecycleError, match="interrupted twice in the middle of a step, which may be half done: shut"):
        rig.rollout()
    rig.policy.shutdown()


@pytest.mark.parametrize("stride", STRIDES)
def test_adding_requests_may_be_interrupted_before_any_line(make_rig, stride):
    rig = make_rig()

    added = []

    def add():
        added[:] = rig.engine.add_requests(PROMPTS, PARAMS)

    number = sweep(add, lambda number: assert_nothing_left(rig, number), stride)
    rig.engine.abort_request(added, discard=True)
    assert number > 100


@pytest.mark.parametrize("stride", [pytest.param(13, marks=pytest.mark.slow), 199])
def test_a_collector_may_be_interrupted_before_any_line(make_rig, stride):
    rig = make_rig()

    def collect():
        options = {"reward_fn": rewards, "groups_per_batch": 1, "max_staleness": 1}
        with rig.policy.collect(PROMPTS, PARAMS, **options) as collector:
            return [tokens_of(batch) for batch in collector]

    expected = collect()

    def check(number):
        assert len(rig.engine.frontend.streams) == 0, f"line {number}: a request was left"
        assert_nothing_left(rig, number)
        assert collect() == expected, f"line {number}: the next call samples other tokens"

    assert sweep(collect, check, stride) > 1000
