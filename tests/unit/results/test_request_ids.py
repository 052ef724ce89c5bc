"""Ids of users are labels: they clash with nothing but the ids of the same client's unfinished requests."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.results.request_ids import RequestIds, as_request_ids

TWO = SamplingParams(n=2, stop=["ab"], max_tokens=20, ignore_eos=True)


def finish_reasons(engine):
    """Request id -> finish reasons of its samples, once all have ended; fails where a request never does."""
    found = {}
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return found
        done = (output for output in engine.step() if output.finished)
        found |= {output.request_id: [sample.finish_reason for sample in output.outputs] for output in done}
    raise AssertionError(f"{engine.get_num_unfinished_requests()} requests never end")


def test_a_stop_string_ends_its_own_sample_beside_a_request_whose_id_looks_like_it(make_engine, encode):
    engine = make_engine(scripts={0: encode("ab")})
    engine.add_request("a", "x", TWO)
    engine.add_request("0_a", "x", SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    assert finish_reasons(engine) == {"a": ["stop", "length"], "0_a": ["length"] * 2}


@pytest.mark.parametrize("ids", [("a", "1_a"), ("1_a", "a")])
def test_ids_that_look_like_samples_of_other_requests_are_taken(engine, ids):
    num_samples = {"a": 2, "1_a": 1}
    for request_id in ids:
        params = SamplingParams(n=num_samples[request_id], max_tokens=4, ignore_eos=True)
        engine.add_request(request_id, "x", params)
    engine.abort_request("1_a")
    assert finish_reasons(engine) == {"a": ["length"] * 2, "1_a": ["abort"]}


def test_an_id_is_free_as_soon_as_its_result_is_returned(make_engine, encode):
    engine = make_engine(scripts={number: encode("ab") for number in range(20)})
    for _ in range(20):
        engine.add_request("a", "x", SamplingParams(stop=["ab"]))
        assert finish_reasons(engine) == {"a": ["stop"]}


def test_what_comes_with_the_end_of_a_stopped_sample_is_returned_too(make_engine, encode, monkeypatch):
    engine = make_engine(scripts={0: encode("ab")})
    engine.add_request("a", "x", SamplingParams(stop=["ab"]))
    engine.add_request("b", "x", SamplingParams(max_tokens=20, ignore_eos=True))
    abort = engine.core.abort_sequences
    monkeypatch.setattr(engine.core, "abort_sequences", lambda ids: abort([*ids, *engine.get_sequence_ids("b")]))
    assert finish_reasons(engine) == {"a": ["stop"], "b": ["abort"]}


def test_a_request_is_known_below_by_numbers_that_are_never_used_again(engine):
    params = SamplingParams(n=2, max_tokens=2, ignore_eos=True)
    numbers = []
    for _ in range(2):
        engine.add_request("a", "x", params)
        numbers += engine.get_sequence_ids("a")
        finish_reasons(engine)
    assert numbers == [0, 1, 2, 3]
    assert engine.get_sequence_ids("a") == engine.get_sequence_ids("nobody") == []


def test_the_log_of_a_failure_names_the_requests_by_the_users_ids(make_engine, caplog):
    engine = make_engine(errors={1: "NaN logits"}, fail_at_steps={3})
    for number in range(10):
        engine.add_request(f"r{number}", "x", SamplingParams(n=2 if number == 0 else 1, max_tokens=9, ignore_eos=True))
    finish_reasons(engine)
    lines = [record.getMessage() for record in caplog.records if record.name == "rollout_engine"]
    assert lines[0] == "NaN logits. This ended sample 1 of 'r0' (sequence 1)"
    assert lines[1].startswith("step 3 failed: RuntimeError: told to fail at step 3. This ended sample 0 of 'r")
    assert lines[1].endswith(" and 2 more") and lines[1].count("(sequence ") == 8 and len(lines) == 2


def test_ids_that_are_made_up_avoid_those_in_use():
    in_use = {"request-2", "request-3"}
    ids = RequestIds(in_use.__contains__)
    assert [ids.make() for _ in range(3)] == ["request-1", "request-4", "request-5"]
    in_use |= {f"request-{number}" for number in range(5_000)}
    assert ids.make() == "request-5000"
    with pytest.raises(RequestError, match="request_id='request-2' is not allowed: must be unique among unfinished"):
        ids.check_id("request-2")


@pytest.mark.parametrize(
    "wrong, why",
    [("a" * 257, "257 characters"), ("\u00fc" * 129, "258 bytes"), ("a" * 10**7, "10000000"), ("\ud800", "")],
)
def test_an_id_longer_than_256_bytes_or_no_unicode_is_refused(engine, wrong, why):
    message = f"request_id='.{{1,90}} is not allowed: must be Unicode text of at most 256 bytes as UTF-8.*{why}"
    with pytest.raises(RequestError, match=message) as refused:
        engine.add_request(wrong, "x", SamplingParams(n=2, max_tokens=2))
    assert refused.value.field == "request_id" and len(str(refused.value)) < 250
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("longest", ["a" * 256, "\u00fc" * 128, "\U0001f600" * 64])
def test_an_id_of_256_bytes_is_taken(engine, longest):
    engine.add_request(longest, "x", SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    assert finish_reasons(engine) == {longest: ["length"] * 2}


@pytest.mark.parametrize("wrong", [5, None, ["a", 5], [["a"]], b"a"])
def test_what_cannot_be_an_id_is_not_aborted_in_silence(engine, wrong):
    with pytest.raises(RequestError, match=r"request_ids=.* must be a request's id, or several: strings"):
        engine.abort_request(wrong)
    assert as_request_ids(["a", "b"]) == ["a", "b"] and as_request_ids("ab") == ["ab"]
