"""Grammars on trial: what takes too long or too much is refused, and the next one is tried as if nothing had been."""

import sys
import threading

import pytest

from rollout_engine import LifecycleError, RequestError
from rollout_engine.grammars.tokenizer_file import serialize_tokenizer
from rollout_engine.grammars.trials import GrammarTrials
from rollout_engine.testing import byte_tokenizer
from tests.forking import in_fork

GOOD = {"json": {"type": "object", "properties": {"a": {"type": "string"}}}}
ENDLESS = {"json": {"type": "integer", "multipleOf": 99999989}}
HOSTILE = [
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"{i} {j}": True}} for j in range(6)]} for i in range(6)]}},
    {"grammar": "start: T\nT: /(.*a.{30})/ & /(.*b.{29})/ & /.*c.{28}/ & ~/.*d.{27}/"},
]


@pytest.fixture
def trials():
    made = GrammarTrials(lambda: serialize_tokenizer(byte_tokenizer()), 259, [2])
    yield made
    made.close()


@pytest.fixture(scope="module")
def lasting_trials():
    """With a process that all wrong grammars are tried in."""
    made = GrammarTrials(lambda: serialize_tokenizer(byte_tokenizer()), 259, [2])
    yield made
    made.close()


def refusal(trials, given):
    with pytest.raises(RequestError) as caught:
        trials.require(given)
    assert caught.value.field == "structured_outputs"
    return str(caught.value)


def test_a_grammar_that_takes_hours_is_refused_and_the_next_one_is_not(trials):
    trials.require(GOOD)
    [process] = trials._process._processes
    assert "takes" in refusal(trials, ENDLESS)
    assert process._process.returncode is not None
    trials.require({"regex": "((a{1000}){1000}){1000}"})  # long, yet no place in it is hard to find
    assert "takes" in refusal(trials, ENDLESS)  # at once: it is known


@pytest.mark.slow
def test_a_forked_child_tries_in_a_process_of_its_own(trials):
    trials.require(GOOD)
    [process] = trials._process._processes

    def check():
        trials.require({"regex": "b+"})
        assert trials._process._processes != [process]
        trials.close()

    in_fork(check)
    trials.require({"regex": "c+"})
    assert trials._process._processes == [process]


@pytest.mark.slow
@pytest.mark.parametrize("given", HOSTILE, ids=["properties", "products", "intersections"])
def test_other_hostile_grammars_are_refused(trials, given):
    assert "must be a grammar that can be compiled" in refusal(trials, given)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"json": False}, "Unsatisfiable schema"),
        ({"json": {"oneOf": [{"type": "object"}, {"type": "object"}]}}, "'x-guidance': {'coerce_one_of': True} to"),
        ({"json": {"$ref": "https://example.com/a.json"}}, "example.com"),
        ({"json": {"$ref": "#"}}, "must be a grammar"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_reason(lasting_trials, given, reason):
    assert reason in refusal(lasting_trials, given)


def test_without_the_package_the_error_names_the_extra(trials, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install 'rollout-engine[grammar]'" in refusal(trials, GOOD)


@pytest.mark.slow
def test_a_process_that_has_ended_itself_is_replaced(trials):
    trials.require(GOOD)
    [process] = trials._process._processes
    process.channel.socket.shutdown(1)  # as if it had been idle for long
    assert process._process.wait(60) == 0
    trials.require({"regex": "b"})
    assert trials._process._processes[0] is not process


@pytest.mark.slow
def test_many_threads_share_one_process(trials):
    problems = []

    def require(number):
        try:
            trials.require({"regex": f"a{{{number % 3 + 1}}}"})
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=require, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and len(trials._process._processes) == 1


@pytest.mark.slow
def test_a_trial_that_the_end_of_the_engine_interrupts_says_so(trials):
    reading, may_read, found = threading.Event(), threading.Event(), []

    def read():
        reading.set()
        may_read.wait()
        return serialize_tokenizer(byte_tokenizer())

    def require():
        try:
            trials.require(GOOD)
        except Exception as problem:
            found.append(problem)

    trials._read_tokenizer = read
    waiting = threading.Thread(target=require)
    waiting.start()
    reading.wait()
    trials.close()
    may_read.set()
    waiting.join()
    for given in (GOOD, {"regex": "b"}):  # no process is started any more
        with pytest.raises(LifecycleError, match="the engine was shut down while it was tried"):
            trials.require(given)
    (problem,) = found
    assert isinstance(problem, LifecycleError) and not trials._process._processes


@pytest.mark.slow
def test_the_process_ends_with_its_owner(trials):
    trials.require(GOOD)
    [process] = trials._process._processes
    trials.close()
    assert process._process.returncode is not None


def test_a_known_grammar_waits_for_no_trial(lasting_trials, monkeypatch):
    given = {"choice": ["known", "before"]}
    lasting_trials.require(given)
    monkeypatch.setattr(lasting_trials, "_lock", None)  # a trial of another grammar holds it for seconds
    lasting_trials.require(given)
