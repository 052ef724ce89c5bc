import gc
import threading
import weakref

import pytest

from rollout_engine.base.errors import LifecycleError, RequestError, RetryableError, WeightUpdateError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.fake_executor import fake_next_token
from rollout_engine.telemetry.stat_loggers import LogLine
from tests.unit.fake_engine import make_engine as make_fake_engine

VOCAB_SIZE = 259


def truth(prompt, seed, count):
    """What the fake model samples after `prompt`, computed alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, seed, VOCAB_SIZE))
    return tokens[len(prompt) :]


def test_requests_of_every_output_kind_end_with_the_same_tokens(engine, drain):
    kinds = ["cumulative", "delta", "final_only"]
    for kind in kinds:
        params = SamplingParams(max_tokens=12, seed=5, n=2, output_kind=kind, ignore_eos=True)
        assert engine.add_request(kind, [7, 8, 9], params) == kind
    outputs = drain(engine)
    finished = {output.request_id: output for output in outputs if output.finished}
    assert sorted(finished) == sorted(kinds)
    expected = [truth([7, 8, 9], sample.seed, 12) for sample in finished["cumulative"].outputs]
    assert expected[0] != expected[1]
    assert [sample.token_ids for sample in finished["cumulative"].outputs] == expected
    assert [sample.token_ids for sample in finished["final_only"].outputs] == expected
    deltas = [sample for output in outputs if output.request_id == "delta" for sample in output.outputs]
    for index in range(2):
        assert sum((s.token_ids for s in deltas if s.index == index), []) == expected[index]
        text = "".join(s.text for s in deltas if s.index == index)
        assert text == finished["final_only"].outputs[index].text
    assert len([output for output in outputs if output.request_id == "final_only"]) == 1


def test_a_stop_string_frees_the_sequence_at_once(make_engine, encode):
    engine = make_engine(scripts={0: encode("hello world")})
    engine.add_request("r", "x", SamplingParams(stop=["lo"], max_tokens=50, output_kind="final_only"))
    outputs = []
    for _ in encode("hello"):
        outputs += engine.step()
    sample = outputs[0].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("hel", "stop", "lo")
    assert engine.core.num_unfinished_requests == 0
    assert not engine.has_unfinished_requests()


def test_a_stop_string_ends_one_sample_and_the_others_go_on(make_engine, drain, encode):
    engine = make_engine(scripts={1: encode("ab")})
    engine.add_request("r", "x", SamplingParams(n=3, stop=["ab"], max_tokens=20, ignore_eos=True, min_tokens=2))
    finished = drain(engine)[-1]
    assert [s.finish_reason for s in finished.outputs] == ["length", "stop", "length"]
    assert finished.outputs[1].token_ids == encode("ab")


def test_the_end_token_is_kept_in_ids_and_left_out_of_the_text(make_engine, drain, encode):
    engine = make_engine(scripts={0: [*encode("hi"), 2]})
    engine.add_request("r", "x", SamplingParams(max_tokens=50))
    sample = drain(engine)[-1].outputs[0]
    assert (sample.token_ids, sample.text) == ([*encode("hi"), 2], "hi")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_an_aborted_request_gives_what_it_had_at_the_next_step(engine, drain):
    engine.add_request("a", "x", SamplingParams(max_tokens=50, ignore_eos=True, output_kind="final_only"))
    engine.add_request("b", "x", SamplingParams(max_tokens=8, ignore_eos=True, output_kind="final_only"))
    for _ in range(3):
        assert engine.step() == []
    engine.abort_request("a")
    assert engine.get_num_unfinished_requests() == 2
    (output,) = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("a", "abort")
    assert len(output.outputs[0].token_ids) == 3
    (rest,) = drain(engine)
    assert rest.outputs[0].finish_reason == "length"


def test_aborting_an_unknown_or_finished_id_changes_nothing(engine, drain):
    engine.add_request("a", "x", SamplingParams(max_tokens=2, ignore_eos=True))
    engine.abort_request(["nobody"])
    outputs = drain(engine)
    engine.abort_request("a")
    assert engine.step() == []
    assert len(outputs[-1].outputs[0].token_ids) == 2


def test_a_discarded_request_gives_nothing(engine):
    engine.add_request("a", "x", SamplingParams(max_tokens=50))
    engine.step()
    engine.add_request("b", "x", SamplingParams(max_tokens=50))
    engine.abort_request("b")
    engine.abort_request(["a", "b"], discard=True)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_a_duplicate_id_is_refused_and_the_first_request_unharmed(engine, drain):
    engine.add_request("a", [7], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    with pytest.raises(RequestError, match="request_id='a' is not allowed: must be unique"):
        engine.add_request("a", [8])
    assert drain(engine)[-1].outputs[0].token_ids == truth([7], 1, 4)


@pytest.mark.parametrize(
    "request_id, priority, words",
    [("", 0, "request_id=''"), (7, 0, "request_id=7"), ([], 0, "request_id="), ("a", "high", "priority='high'")],
)
def test_bad_ids_and_priorities_are_refused(engine, request_id, priority, words):
    with pytest.raises(RequestError, match=words):
        engine.add_request(request_id, "x", priority=priority)


def test_lower_priorities_go_first(engine, drain):
    params = SamplingParams(max_tokens=1, n=10, output_kind="final_only")
    for name, priority in [("late", 1), ("soon", 0), ("first", -1)]:
        engine.add_request(name, [5] * 40, params, priority=priority)
    assert [output.request_id for output in drain(engine)] == ["first", "soon", "late"]


def test_an_id_is_free_again_only_after_its_result_was_returned(engine, drain):
    engine.add_request("a", "x")
    engine.abort_request("a")
    with pytest.raises(RequestError, match="unique"):
        engine.add_request("a", "x")
    engine.step()
    engine.add_request("a", "x", SamplingParams(max_tokens=1))
    assert drain(engine)[-1].finished


def test_a_refused_batch_queues_nothing(engine):
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt_token_ids\[0\]=4000"):
        engine.add_requests([[5], [4000]], SamplingParams())
    assert not engine.has_unfinished_requests()


def test_refusal_at_the_cores_door_takes_the_batch_back_and_nothing_else(engine):
    params = SamplingParams(max_tokens=1, n=2)
    stranger = EngineCoreRequest(prompt_token_ids=[5], params=params, max_tokens=1, seed=0, first_sequence_id=3)
    engine.core.add_request(stranger)
    engine.add_request("a", "x", SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=r"prompts\[1\]: first_sequence_id=3"):
        engine.add_requests(["a", "b", "c"], params)
    (output,) = engine.step()
    assert output.request_id == "a"


def test_new_ids_avoid_those_of_open_requests(engine, drain):
    engine.add_request("request-1", "x", SamplingParams(max_tokens=1))
    assert engine.add_requests(["a", "b"], SamplingParams(max_tokens=1)) == ["request-2", "request-3"]
    drain(engine)


def test_a_failed_step_ends_its_requests_with_the_error_and_the_engine_lives(make_engine, drain):
    engine = make_engine(fail_at_steps={1})
    engine.add_request("a", "x", SamplingParams(max_tokens=4))
    failed = drain(engine)[-1].outputs[0]
    assert failed.finish_reason == "error"
    assert "told to fail" in failed.error
    engine.add_request("b", "x", SamplingParams(max_tokens=4, ignore_eos=True))
    assert drain(engine)[-1].outputs[0].finish_reason == "length"


def test_seeds_without_a_seed_follow_the_engine_seed_and_the_order_of_requests(make_engine, drain):
    def seeds(engine):
        for i in range(3):
            engine.add_request(f"r{i}", [5], SamplingParams(max_tokens=1))
        return [output.outputs[0].seed for output in drain(engine)]

    first = seeds(make_engine(seed=1))
    assert first == seeds(make_engine(seed=1))
    assert len(set(first)) == 3
    assert not set(first) & set(seeds(make_engine(seed=2)))


def test_scores_skip_empty_completions_and_read_greedy_as_temperature_one(engine):
    scores = engine.score([[5], [6], [7, 8]], [[1, 2], [], [3]], temperature=0.0)
    assert [list(score) for score in scores] == [[-1.0, -2.0], [], [-2.0]]
    assert engine.executor.scored_at == 1.0
    assert engine.score([], []) == []
    with pytest.raises(RequestError, match=r"completion_token_ids\[1\]='b' .* must be a list of token ids"):
        engine.score([[5], [6]], [[1], "b"])


def test_the_tokenizer_and_the_weights_names_can_be_read(make_engine, codec):
    engine = make_engine()
    assert engine.get_tokenizer() is codec.hf
    assert engine.get_model_metadata() == {"embed.weight": ("float32", (VOCAB_SIZE, 8))}
    with pytest.raises(LifecycleError, match="skip_tokenizer_init"):
        make_engine(with_tokenizer=False).get_tokenizer()


def test_without_a_tokenizer_outputs_have_no_text(make_engine, drain):
    engine = make_engine(with_tokenizer=False)
    engine.add_request("a", [5], SamplingParams(max_tokens=3, ignore_eos=True))
    sample = drain(engine)[-1].outputs[0]
    assert (sample.text, len(sample.token_ids)) == ("", 3)


def test_a_misspelt_kv_is_refused_before_anything_is_touched(engine):
    with pytest.raises(WeightUpdateError, match="kv='keeep' is not allowed"):
        engine.update_weights({}, kv="keeep")


def test_cache_usage_counts_the_blocks_of_live_requests(engine, drain):
    engine.add_request("a", [5] * 20, SamplingParams(max_tokens=4))
    engine.step()
    assert engine.get_cache_usage() == 5 / 256
    drain(engine)


def test_threads_may_add_abort_and_step_at_once(engine):
    params = SamplingParams(max_tokens=6, ignore_eos=True, output_kind="final_only")
    finished, adders = [], []

    def add(name):
        for i in range(20):
            engine.add_request(f"{name}{i}", [5, i], params)
            if i % 3 == 0:
                engine.abort_request(f"{name}{i}")

    for name in "abc":
        adders.append(threading.Thread(target=add, args=(name,)))
        adders[-1].start()
    while any(adder.is_alive() for adder in adders) or engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step()]
    assert sorted(finished) == sorted(f"{name}{i}" for name in "abc" for i in range(20))


def test_after_shutdown_every_verb_says_so(make_engine):
    engine = make_engine()
    with engine:
        pass
    engine.shutdown()  # again: a no-op
    assert engine.executor.is_shut_down
    for verb in (engine.step, lambda: engine.add_request("a", "x"), lambda: engine.abort_request("a")):
        with pytest.raises(LifecycleError, match="shut down"):
            verb()


def test_an_engine_that_goes_away_frees_its_executor(codec):
    engine = make_fake_engine(codec)
    executor, gone = engine.executor, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert executor.is_shut_down


def test_one_line_is_logged_when_a_batch_of_work_ends(make_engine, drain, caplog):
    engine = make_engine(stat_loggers=[LogLine()])
    with caplog.at_level("INFO", logger="rollout_engine"):
        engine.add_requests([[5], [6]], SamplingParams(max_tokens=3, ignore_eos=True))
        drain(engine)
        engine.shutdown()  # which waits for the line
    (record,) = caplog.records
    assert "6 tokens sampled" in record.message
    assert "2 prompt tokens computed" in record.message


class FailingTokenizer:
    """The byte tokenizer, but it cannot decode `bad`."""

    def __init__(self, codec, bad):
        self._codec, self._bad = codec, bad

    def new_stream(self, **options):
        stream, bad = self._codec.new_stream(**options), self._bad
        push = stream.push

        def guarded(token_ids):
            if bad in token_ids:
                raise KeyError(bad)
            return push(token_ids)

        stream.push = guarded
        return stream


@pytest.mark.parametrize("options", [dict(), dict(output_kind="final_only"), dict(stop=["\x00"]), dict(n=2)])
def test_a_tokenizer_that_raises_fails_its_own_sample_and_no_other(make_engine, drain, codec, options):
    engine = make_engine(scripts={0: [9, 200, 9, 9, 9], options.get("n", 1): [9] * 5})
    engine.frontend.streams._processor._codec = FailingTokenizer(codec, 200)
    for name in ("bad", "good"):
        engine.add_request(name, [5], SamplingParams(max_tokens=5, ignore_eos=True, **options))
    finished = {output.request_id: output.outputs for output in drain(engine) if output.finished}
    failed = finished["bad"][0]
    assert failed.finish_reason == "error" and failed.text == "" and failed.token_ids[:2] == [9, 200]
    assert failed.error.startswith("the tokenizer cannot decode its tokens: KeyError: 200.")
    assert [sample.finish_reason for sample in finished["good"] + finished["bad"][1:]] == ["length"] * (
        2 * options.get("n", 1) - 1
    )


def test_a_tokenizer_that_raises_at_admission_leaves_no_request_behind(make_engine, monkeypatch):
    engine = make_engine()
    new_stream, calls = engine.frontend.streams._processor._codec.new_stream, []

    def second_fails(**options):
        calls.append(options)
        if len(calls) % 2 == 0:
            raise KeyError("no such special token")
        return new_stream(**options)

    monkeypatch.setattr(engine.frontend.streams._processor._codec, "new_stream", second_fails)
    with pytest.raises(KeyError, match="no such special token"):
        engine.add_requests([[5], [6]], SamplingParams(max_tokens=5))
    with pytest.raises(KeyError, match="no such special token"):
        engine.add_request("a", [5], SamplingParams(max_tokens=5, n=2))
    assert engine.core.unfinished_sequences == [] and not engine.has_unfinished_requests()


def test_a_request_that_the_core_refuses_leaves_nothing_behind(make_engine, monkeypatch):
    engine = make_engine()

    def refuse(request):
        raise RequestError.for_field("prompt_token_ids", "1 token", "shorter")

    monkeypatch.setattr(engine.core, "add_request", refuse)
    for _ in range(2):  # the id is free again
        with pytest.raises(RequestError, match="must be shorter"):
            engine.add_request("a", [5])
    with pytest.raises(RequestError, match=r"prompts\[0\]"):
        engine.add_requests([[5], [6]])
    assert not engine.has_unfinished_requests()


def test_an_error_of_one_request_loses_no_output_of_another(make_engine, monkeypatch):
    engine = make_engine()
    for name in ("good", "bad"):
        engine.add_request(name, [5], SamplingParams(max_tokens=1, ignore_eos=True))
    take = engine.frontend.take

    def refused(stream):
        if stream.request_id == "bad":
            raise RetryableError("refused by the core")
        return take(stream)

    monkeypatch.setattr(engine.frontend, "take", refused)
    with pytest.raises(RetryableError, match="refused by the core"):
        engine.step()
    (output,) = engine.step()
    assert (output.request_id, output.finished) == ("good", True)
    assert not engine.has_unfinished_requests()
