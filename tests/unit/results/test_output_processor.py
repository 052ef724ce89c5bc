import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs, PromptLogprobs, SequenceEnd
from rollout_engine.base.outputs import VersionSpan
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed
from rollout_engine.results.output_processor import OutputProcessor

FIRST_SEQUENCE = 40


@pytest.fixture
def processor(codec):
    made = OutputProcessor(codec)
    yield made
    assert not (made._requests or made._owners or made._live)


def add(processor, request_id="r", seed=3, **params):
    made = SamplingParams(**params)
    request = EngineCoreRequest(
        prompt_token_ids=[5, 6],
        params=made,
        max_tokens=99,
        seed=seed,
        first_sequence_id=FIRST_SEQUENCE,
    )
    processor.add(request_id, request, "prompt")
    return request


def process(processor, outputs):
    """(results, the sequences to abort) of one step."""
    changed, stopped = processor.update(outputs)
    return [result for request in changed if (result := processor.take(request)) is not None], stopped


def token(token_id, *, index=0, logprob=-0.5, k=0, mass=-0.125, versions=(0, 0), end=None, **fields):
    """A step that brought one token to one sample, and perhaps its end."""
    top = (np.arange(k, dtype=np.int32)[None] + token_id, -np.arange(k, dtype=np.float32)[None])
    sequence = FIRST_SEQUENCE + index
    ranks = {"sampled_ranks": np.ones(1, np.int32)} if k else {}
    return EngineCoreOutputs(
        versions[0],
        [sequence],
        [token_id],
        [versions[1]],
        logprobs=[logprob],
        top_logprobs=top if k else None,
        kept_logprob_mass=[mass],
        ended=[] if end is None else [SequenceEnd(sequence, end)],
        **(ranks | fields),
    )


def ended(reason, *indexes, error=None):
    """A step in which samples ended without a token."""
    return EngineCoreOutputs(0, ended=[SequenceEnd(FIRST_SEQUENCE + i, reason, error=error) for i in indexes or (0,)])


def joined(*steps):
    """The tokens and ends of several samples in one step."""
    columns = ("sequence_ids", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass", "ended")
    return EngineCoreOutputs(0, **{name: sum((getattr(step, name) for step in steps), []) for name in columns})


def test_cumulative_outputs_carry_all_so_far(processor):
    add(processor)
    seen = [process(processor, token(t, end="length" if t == 76 else None))[0][0] for t in (74, 75, 76)]
    assert [output.outputs[0].token_ids for output in seen] == [[74], [74, 75], [74, 75, 76]]
    assert [output.outputs[0].text for output in seen] == ["h", "hi", "hij"]
    assert [output.finished for output in seen] == [False, False, True]
    assert [output.outputs[0].finish_reason for output in seen] == [None, None, "length"]


class CountedId(str):
    num_shown = 0

    def __repr__(self):
        CountedId.num_shown += 1
        return super().__repr__()


def test_the_failure_of_a_large_group_writes_its_id_only_as_often_as_the_log_shows_it(processor):
    add(processor, CountedId("r"), n=4096)
    process(processor, ended("error", *range(4096), error="NaN logits"))
    assert CountedId.num_shown == 8


def test_delta_outputs_carry_only_what_is_new_and_add_up(processor):
    add(processor, output_kind="delta", logprobs=2, top_k=3)
    steps = [(74, (0, 0)), (75, (0, 0)), (76, (1, 0))]
    seen = []
    for token_id, versions in steps:
        last = "length" if token_id == 76 else None
        (output,), _ = process(processor, token(token_id, k=2, logprob=-token_id, versions=versions, end=last))
        seen.append(output.outputs[0])
    assert [s.token_ids for s in seen] == [[74], [75], [76]]
    assert [s.text for s in seen] == ["h", "i", "j"]
    assert [s.logprobs.tolist() for s in seen] == [[-74], [-75], [-76]]
    assert [s.top_logprobs[0].tolist() for s in seen] == [[[74, 75]], [[75, 76]], [[76, 77]]]
    assert [len(s.kept_logprob_mass) for s in seen] == [1, 1, 1]
    assert [s.cumulative_logprob for s in seen] == [-74, -149, -225]
    spans = [VersionSpan(0, 1, 0, 0), VersionSpan(1, 2, 0, 0), VersionSpan(2, 3, 1, 0)]
    assert [s.version_spans for s in seen] == [[span] for span in spans]


def test_final_only_is_silent_until_all_samples_have_ended(processor):
    add(processor, n=2, output_kind="final_only")
    assert process(processor, joined(token(74), token(75, index=1))) == ([], [])
    assert process(processor, token(76, index=1, end="stop")) == ([], [])
    (output,), _ = process(processor, token(77, end="length"))
    assert output.finished
    assert [(s.index, s.token_ids, s.finish_reason) for s in output.outputs] == [
        (0, [74, 77], "length"),
        (1, [75, 76], "stop"),
    ]


def test_streamed_outputs_hold_the_samples_that_changed_in_index_order(processor):
    add(processor, n=3)
    (output,), _ = process(processor, joined(token(75, index=2), token(74, index=0, end="stop")))
    assert [s.index for s in output.outputs] == [0, 2]
    (output,), _ = process(processor, joined(token(76, index=1, end="stop"), token(77, index=2, end="stop")))
    assert [s.index for s in output.outputs] == [0, 1, 2]  # the finished one holds all
    assert output.finished


def test_columns_have_their_shapes_and_dtypes(processor):
    add(processor, logprobs=2, top_p=0.5, output_kind="final_only")
    process(processor, token(74, k=2, logprob=-0.25))
    (output,), _ = process(processor, token(75, k=2, logprob=-0.5, end="length"))
    sample = output.outputs[0]
    assert (sample.logprobs.dtype, sample.logprobs.tolist()) == (np.float32, [-0.25, -0.5])
    assert sample.cumulative_logprob == -0.75
    ids, values = sample.top_logprobs
    assert (ids.dtype, ids.tolist()) == (np.int32, [[74, 75], [75, 76]])
    assert (values.dtype, values.shape) == (np.float32, (2, 2))
    assert (sample.kept_logprob_mass.dtype, sample.kept_logprob_mass.shape) == (np.float32, (2,))
    assert sample.logprobs.flags.writeable


def test_a_request_keeps_as_many_top_logprobs_as_it_asked_for(processor):
    add(processor, logprobs=2)
    (output,), _ = process(processor, token(74, k=5, end="length"))
    assert [column.tolist() for column in output.outputs[0].top_logprobs] == [[[74, 75]], [[0, -1]]]


def test_columns_nobody_asked_for_are_absent(processor):
    add(processor)
    (output,), _ = process(processor, token(74, end="length"))
    sample = output.outputs[0]
    assert (sample.logprobs, sample.top_logprobs, sample.kept_logprob_mass) == (None, None, None)
    assert sample.cumulative_logprob is None


def test_a_sample_that_ends_without_tokens_has_empty_columns(processor):
    add(processor, logprobs=2, top_k=1)
    (output,), _ = process(processor, ended("abort"))
    sample = output.outputs[0]
    assert (sample.token_ids, sample.text, sample.version_spans) == ([], "", [])
    assert (sample.logprobs.shape, sample.top_logprobs[0].shape, sample.kept_logprob_mass.shape) == ((0,), (0, 2), (0,))


def test_neighbouring_tokens_of_the_same_versions_share_a_span(processor):
    add(processor, output_kind="final_only")
    versions = [(0, 0), (0, 0), (1, 0), (1, 1), (1, 1)]
    for pair in versions[:-1]:
        process(processor, token(74, versions=pair))
    (output,), _ = process(processor, token(74, versions=versions[-1], end="length"))
    expected = [VersionSpan(0, 2, 0, 0), VersionSpan(2, 3, 1, 0), VersionSpan(3, 5, 1, 1)]
    assert output.outputs[0].version_spans == expected


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_ends_the_sample_and_names_its_sequence(processor, codec, n):
    add(processor, n=n, stop=["lo"], logprobs=0, output_kind="final_only")
    stopped = []
    for token_id in codec.encode("hello"):
        outputs, ids = process(processor, token(token_id, index=n - 1))
        stopped += ids
    assert stopped == [FIRST_SEQUENCE + n - 1]
    if n > 1:
        (outputs, _) = process(processor, ended("abort", n - 1, *range(n - 1)))
    sample = outputs[0].outputs[n - 1]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("hel", "stop", "lo")
    assert sample.token_ids == codec.encode("hello")


def test_an_error_ends_one_sample_and_says_why(processor):
    add(processor, n=2, output_kind="final_only")
    process(processor, ended("error", 1, error="NaN logits"))
    (output,), _ = process(processor, token(74, end="length"))
    assert [(s.finish_reason, s.error) for s in output.outputs] == [("length", None), ("error", "NaN logits")]


def test_without_detokenize_nothing_is_decoded(codec):
    class Untouched:
        def new_stream(self, **_):
            raise AssertionError("nothing may be decoded")

    processor = OutputProcessor(Untouched())
    add(processor, detokenize=False)
    (output,), _ = process(processor, token(74, end="length"))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [74])


def test_seeds_are_those_that_replay_each_sample(processor):
    add(processor, n=3, seed=11)
    (output,), _ = process(processor, ended("abort", 0, 1, 2))
    assert [s.seed for s in output.outputs] == [child_seed(11, i) for i in range(3)]


def test_metrics_are_in_order_on_one_clock(processor):
    add(processor)
    (first,), _ = process(processor, token(74, num_cached_tokens={FIRST_SEQUENCE: 16}))
    assert first.metrics.arrival_time <= first.metrics.first_token_time
    assert first.metrics.finished_time is None
    assert first.num_cached_tokens == 16
    (last,), _ = process(processor, token(75, end="stop"))
    assert last.metrics.first_token_time == first.metrics.first_token_time <= last.metrics.finished_time
    assert first.metrics.finished_time is None  # an output does not change after it was returned


def test_the_users_prompt_ids_are_not_the_cores(processor):
    request = add(processor)
    (output,), _ = process(processor, ended("abort"))
    output.prompt_token_ids.clear()
    assert request.prompt_token_ids == [5, 6]


def test_a_request_is_open_until_it_ends(processor):
    add(processor)
    assert "r" in processor
    process(processor, ended("abort"))
    assert "r" not in processor


def test_outputs_of_discarded_requests_are_ignored(processor):
    add(processor)
    processor.discard("r")
    processor.discard("never seen")
    assert process(processor, token(74)) == ([], [])


@pytest.mark.parametrize("kind, told", [("cumulative", [True, True]), ("delta", [True, False]), ("final_only", [True])])
def test_log_probs_of_the_prompt_are_told_as_the_output_kind_says(processor, kind, told):
    add(processor, prompt_logprobs=1, output_kind=kind)
    top = np.array([[-1], [9]], np.int32), np.array([[np.nan], [-0.25]], np.float32)
    found = PromptLogprobs(np.array([np.nan, -0.5], np.float32), top, np.array([0, 7], np.int32))
    steps = [token(74, prompt_logprobs={FIRST_SEQUENCE: found}), token(75, end="length")]
    outputs = [output for step in steps for output in process(processor, step)[0]]
    assert [output.prompt_logprobs is found.logprobs for output in outputs] == told
    assert [output.prompt_top_logprobs is top for output in outputs] == told
    assert [output.prompt_ranks is found.ranks for output in outputs] == told


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
@pytest.mark.parametrize("keep", [False, True])
def test_the_text_of_a_stop_token_is_never_shown_and_its_id_is(processor, kind, keep):
    params = dict(stop_token_ids=[76], logprobs=0, output_kind=kind, include_stop_str_in_output=keep)
    add(processor, **params)
    steps = [token(74), token(75), token(76), ended("stop")]  # the end may come in a message of its own
    seen = [output for step in steps for output in process(processor, step)[0]]
    texts = [output.outputs[0].text for output in seen]
    ids = [output.outputs[0].token_ids for output in seen]
    assert ("".join(texts) if kind == "delta" else texts[-1]) == ("hij" if keep else "hi")
    assert keep or not any("j" in text for text in texts)
    assert (sum(ids, []) if kind == "delta" else ids[-1]) == [74, 75, 76]
    assert len(np.concatenate([output.outputs[0].logprobs for output in seen][-1 if kind != "delta" else 0 :])) == 3


def test_an_end_id_that_is_ignored_is_text(processor):
    add(processor, ignore_eos=True, skip_special_tokens=False)  # the request then has no end ids
    (output,), _ = process(processor, joined(token(2)))
    assert output.outputs[0].text == "<eos>"
    process(processor, ended("abort"))


def test_the_text_goes_on_where_the_prompt_stops(processor):
    """The prompt ends in the first byte of a character."""
    request = EngineCoreRequest(
        prompt_token_ids=processor._codec.encode("\N{LATIN SMALL LETTER E WITH ACUTE}")[:1],
        params=SamplingParams(),
        max_tokens=9,
        seed=0,
        first_sequence_id=FIRST_SEQUENCE,
    )
    processor.add("r", request, "?")
    last = processor._codec.encode("\N{LATIN SMALL LETTER E WITH ACUTE}")[1]
    (output,), _ = process(processor, token(last, end="length"))
    assert output.outputs[0].text == "\N{LATIN SMALL LETTER E WITH ACUTE}"


def test_tokens_that_come_after_a_request_was_discarded_leave_nothing(processor):
    add(processor)
    process(processor, token(70))
    processor.discard("r")
    process(processor, token(71))
    process(processor, ended("abort"))
    assert processor._timer._last_token == {}


def test_a_stop_pattern_ends_its_sample_and_is_the_reason(processor):
    add(processor, n=2, stop_regex=["h+i"])
    process(processor, joined(token(74), token(75, index=1)))
    (output,), stopped = process(processor, joined(token(75), token(76, index=1)))
    assert stopped == [FIRST_SEQUENCE]
    first = output.outputs[0]
    assert (first.text, first.token_ids, first.finish_reason, first.stop_reason) == ("", [74, 75], "stop", "h+i")
    process(processor, ended("abort", 0, 1))


def test_a_pattern_that_explodes_fails_its_sample_alone(processor):
    add(processor, n=2, stop_regex=["(h|hh)+c"], output_kind="final_only")
    stopped = []
    for _ in range(60):
        stopped += process(processor, joined(token(74), token(75, index=1)))[1]
    assert stopped == [FIRST_SEQUENCE]
    (output,), _ = process(processor, ended("length", 1))
    assert [sample.finish_reason for sample in output.outputs] == ["error", "length"]
    assert "took more than" in output.outputs[0].error


@pytest.mark.parametrize("kind, lengths", [("delta", [1, 3, 3, 1]), ("cumulative", [1, 4, 7, 8]), ("final_only", [8])])
def test_streamed_outputs_come_every_few_tokens_and_at_the_end(codec, kind, lengths):
    processor = OutputProcessor(codec, stream_interval=3)
    add(processor, output_kind=kind)
    steps = [token(74 + i, end="length" if i == 7 else None) for i in range(8)]
    seen = [output for step in steps for output in process(processor, step)[0]]
    assert [len(output.outputs[0].token_ids) for output in seen] == lengths
    assert [output.finished for output in seen] == [False] * (len(lengths) - 1) + [True]


def test_a_stop_string_between_two_streamed_outputs_ends_at_once(codec):
    processor = OutputProcessor(codec, stream_interval=5)
    add(processor, stop=["j"])
    seen = [output for t in (74, 75, 76) for output in process(processor, token(t))[0]]
    assert [(output.outputs[0].text, output.finished) for output in seen] == [("h", False), ("hi", True)]


def test_log_probs_of_all_tokens_come_sorted_and_those_of_given_ids_in_their_order(processor):
    add(processor, logprobs=-1, logprob_token_ids=[2, 0], output_kind="delta")
    rows = np.float32([[-3, -1, -2, -1], [-1, -2, -3, -4]])
    for place, row in enumerate(rows):
        fields = {"sampled_ranks": np.array([place + 4], np.int32), "id_logprobs": IdLogprobs.of({FIRST_SEQUENCE: row})}
        step = token(74, k=2, end="length" if place else None, **fields)  # k: of another request of the step
        (output,), _ = process(processor, step)
        sample = output.outputs[0]
        ids, values = sample.top_logprobs
        assert ids.tolist() == [[[1, 3, 2, 0]], [[0, 1, 2, 3]]][place] and ids.dtype == np.int32
        assert np.array_equal(values[0], row[ids[0]])
        assert np.array_equal(sample.token_id_logprobs, row[None, [2, 0]])
        assert sample.sampled_ranks.tolist() == [place + 4] and sample.sampled_ranks.dtype == np.int32


def test_who_asks_for_no_ids_and_ranks_gets_none_of_others(processor):
    add(processor, logprobs=0, logprob_token_ids=[])
    (output,), _ = process(processor, token(74, k=2, end="stop", sampled_ranks=np.array([3], np.int32)))
    assert output.outputs[0].sampled_ranks is output.outputs[0].token_id_logprobs is None


def test_a_sample_without_tokens_has_empty_columns(processor):
    add(processor, logprobs=-1, logprob_token_ids=[2, 0])
    (output,), _ = process(processor, ended("abort"))
    sample = output.outputs[0]
    assert (sample.token_id_logprobs.shape, sample.sampled_ranks.shape) == ((0, 2), (0,))
    assert sample.top_logprobs[0].shape[0] == 0
