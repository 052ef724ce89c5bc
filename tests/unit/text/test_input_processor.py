import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.text.input_processor import InputProcessor, one_each

MAX_MODEL_LEN, VOCAB_SIZE, EOS = 32, 259, 2
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def inputs(codec):
    return InputProcessor(codec, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], seed=7)


def without_tokenizer():
    return InputProcessor(None, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


@pytest.mark.parametrize(
    "prompt, text",
    [
        ("hé", "hé"),
        ({"prompt": "hé", "cache_salt": "s"}, "hé"),
        ([74, 130, 105], None),
        ((74, 130, 105), None),
        ([74, np.int64(130), np.int32(105)], None),
        (np.array([74, 130, 105]), None),
        ({"prompt_token_ids": [74, 130, 105], "cache_salt": None}, None),
    ],
)
def test_every_kind_of_prompt_gives_its_token_ids(inputs, prompt, text):
    checked = inputs.check(prompt, None)
    assert checked.token_ids == [74, 130, 105]
    assert all(type(token_id) is int for token_id in checked.token_ids)
    assert checked.text == text


def test_the_cache_salt_is_kept_and_empty_by_default(inputs):
    prompts = [{"prompt": "h", "cache_salt": "s"}, {"prompt": "h", "cache_salt": None}, {"prompt": "h"}, "h"]
    assert [inputs.check(prompt, None).cache_salt for prompt in prompts] == ["s", "", "", ""]


def test_a_conversation_goes_through_the_chat_template(inputs, codec):
    checked = inputs.check({"messages": HI, "tools": []}, None)
    assert checked.text == "<|user|>hi<eos><|assistant|>"
    assert checked.token_ids == codec.encode(checked.text)


def test_token_ids_are_copied(inputs):
    mine = [5, 6]
    checked = inputs.check(mine, None)
    mine.append(7)
    assert checked.token_ids == [5, 6]


def test_one_list_of_ints_is_one_prompt_and_a_list_of_lists_is_many(inputs):
    assert [c.token_ids for c in inputs.check_batch([5, 6], None)] == [[5, 6]]
    assert [c.token_ids for c in inputs.check_batch([[5], [6]], None)] == [[5], [6]]
    assert [c.token_ids for c in inputs.check_batch(["h", [6], {"prompt": "h"}], None)] == [[74], [6], [74]]
    assert inputs.check_batch([], None) == []


def test_max_tokens_none_fills_the_model_length(inputs):
    assert inputs.check([5] * 20, None).max_tokens == MAX_MODEL_LEN - 20
    assert inputs.check([5] * 20, SamplingParams(max_tokens=12)).max_tokens == 12


def test_truncation_keeps_the_last_tokens_and_comes_before_the_bounds(inputs):
    checked = inputs.check(list(range(3, 103)), SamplingParams(truncate_prompt_tokens=4, max_tokens=28))
    assert checked.token_ids == [99, 100, 101, 102]


def test_truncation_on_the_right_keeps_the_first_tokens(inputs):
    long = list(range(3, 103))
    for most, kept in ((4, 4), (-1, 4)):
        params = SamplingParams(truncate_prompt_tokens=most, truncation_side="right", max_tokens=28)
        assert inputs.check(long, params).token_ids == long[:kept]
    assert inputs.check([5, 6], SamplingParams(truncation_side="right", max_tokens=28)).token_ids == [5, 6]
    with pytest.raises(RequestError, match="truncation_side='middle' is not allowed"):
        SamplingParams(truncation_side="middle")


def test_truncation_may_leave_just_the_room_that_max_tokens_needs(inputs):
    long = list(range(3, 103))
    cut = [(SamplingParams(truncate_prompt_tokens=-1, max_tokens=most), kept) for most, kept in [(28, 4), (None, 31)]]
    for params, kept in cut:
        assert inputs.check(long, params).token_ids == long[-kept:]
    assert inputs.check([5, 6], SamplingParams(truncate_prompt_tokens=-1, max_tokens=28)).token_ids == [5, 6]
    with pytest.raises(RequestError, match="max_tokens=32 is not allowed: must be below max_model_len=32"):
        inputs.check(long, SamplingParams(truncate_prompt_tokens=-1, max_tokens=32))
    with pytest.raises(RequestError, match="truncate_prompt_tokens=0 is not allowed: must be -1 or >= 1"):
        SamplingParams(truncate_prompt_tokens=0)


@pytest.fixture
def clamping(codec):
    return InputProcessor(codec, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, clamps=True)


def test_what_does_not_fit_is_shortened_where_the_engine_clamps_and_counted_once(clamping, caplog):
    checked = clamping.check_batch([[5], [5] * 30, [5] * 31], SamplingParams(max_tokens=10))
    assert [each.max_tokens for each in checked] == [10, 2, 1]
    (record,) = caplog.records
    assert record.getMessage() == (
        "max_tokens of 2 of 3 prompts was shortened to the room left in max_model_len=32 "
        "(first of prompts[1], from 10 to 2)."
    )


def test_nothing_is_said_where_all_fits(clamping, caplog):
    clamping.check_batch([[5], [5] * 22], SamplingParams(max_tokens=10))
    clamping.check([5] * 30, None)
    assert not caplog.records


def test_clamping_keeps_what_cannot_be_shortened_refused(clamping):
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt='32 tokens' is not allowed.*truncate_prompt_tokens"):
        clamping.check_batch([[5], [5] * 32], SamplingParams(max_tokens=10))
    with pytest.raises(RequestError, match="min_tokens=3 is not allowed: must be at most 2"):
        clamping.check([5] * 30, SamplingParams(max_tokens=10, min_tokens=3))


def test_a_refused_max_tokens_names_the_option_that_shortens_it(inputs):
    with pytest.raises(RequestError, match=r"EngineConfig\(on_long='clamp'\) shortens it instead"):
        inputs.check([5] * 30, SamplingParams(max_tokens=10))


@pytest.mark.parametrize(
    "priority, each", [(3, [3, 3]), ([1, 2], [1, 2]), (np.array([1, 2]), [1, 2]), (np.int64(3), [3, 3])]
)
def test_a_priority_is_for_all_prompts_or_one_each(priority, each):
    assert one_each("priority", priority, 2, "an int") == each
    with pytest.raises(RequestError, match="priority='a list of 3' is not allowed: must be an int, or 2: one per"):
        one_each("priority", [1, 2, 3], 2, "an int")


@pytest.mark.parametrize(
    "prompt, params, field, words",
    [
        ("", {}, "prompt", "at least one token"),
        ([], {}, "prompt", "at least one token"),
        ({"prompt_token_ids": []}, {}, "prompt", "at least one token"),
        ([5, 300], {}, "prompt_token_ids[1]", r"300 is not allowed: must be in \[0, 259\)"),
        ([5, -1], {}, "prompt_token_ids[1]", "-1"),
        ([5, 2**70], {}, "prompt_token_ids[1]", "must be in"),
        ([5, "a"], {}, "prompt_token_ids[1]", "an int"),
        ([5, True], {}, "prompt_token_ids[1]", "an int"),
        ([5, 1.0], {}, "prompt_token_ids[1]", "an int"),
        (np.array([5.0]), {}, "prompt_token_ids[0]", "an int"),
        (np.array([[5]]), {}, "prompt_token_ids", "a list of token ids"),
        (np.array(5), {}, "prompt_token_ids", "a list of token ids"),
        ({"prompt_token_ids": "abc"}, {}, "prompt_token_ids", "a list of token ids"),
        ("\ud800", {}, "prompt", "text the tokenizer can encode"),
        (7, {}, "prompt", "a str, a list of token ids"),
        (None, {}, "prompt", "a str, a list of token ids"),
        ({"promt": "x"}, {}, "promt", "Did you mean 'prompt'"),
        ({"prompt": "x", "prompt_token_ids": [5]}, {}, "prompt", "exactly one of"),
        ({"cache_salt": "x"}, {}, "prompt", "exactly one of"),
        ({"prompt": 5}, {}, "prompt", "a str"),
        ({"prompt": "x", "cache_salt": 5}, {}, "cache_salt", "a str"),
        ({"prompt": "x", "tools": [{}]}, {}, "tools", "given with a conversation"),
        ({"messages": "hi"}, {}, "messages", "a list"),
        ({"messages": [5]}, {}, "messages[0]", "a message: a dict"),
        ([5] * 32, {}, "prompt", r"max_model_len=32.*truncate_prompt_tokens"),
        ([5] * 30, {"max_tokens": 3}, "max_tokens", r"at most 2\. The prompt has 30 tokens.*max_model_len=32"),
        ([5] * 30, {"min_tokens": 3}, "min_tokens", "at most 2"),
        ([5], {"stop_token_ids": [259]}, "stop_token_ids", r"ids in \[0, 259\)"),
        ([5], {"allowed_token_ids": [3, 259]}, "allowed_token_ids", r"259 is not allowed: must be ids in \[0, 259\)"),
        ([5], {"logit_bias": {259: 1.0}}, "logit_bias", r"ids in \[0, 259\)"),
        ([5], {"extra_args": {"a": 1}}, "extra_args", "no logits_processors"),
        ([5], {"bad_words": ["\ud800"]}, "bad_words", "Unicode text"),
    ],
)
def test_bad_requests_name_field_value_and_bound(inputs, prompt, params, field, words):
    with pytest.raises(RequestError, match=f"(?s){words}") as caught:
        inputs.check(prompt, SamplingParams(**params))
    assert caught.value.field == field


def test_params_of_the_wrong_type_are_refused(inputs):
    with pytest.raises(RequestError, match="sampling_params='hot' .* must be SamplingParams, a dict"):
        inputs.check("x", "hot")


def test_a_dict_of_fields_stands_for_sampling_params(inputs):
    assert inputs.check("x", {"temperature": 0.5}).params == SamplingParams(temperature=0.5)
    assert [c.params.n for c in inputs.check_batch(["a", "b"], [{"n": 2}, None])] == [2, 1]
    with pytest.raises(RequestError, match=r"^prompts\[1\]: temperature=-1"):
        inputs.check_batch(["a", "b"], [{}, {"temperature": -1}])


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_top_logprobs_than_the_vocabulary_are_refused(codec, field):
    small = InputProcessor(codec, max_model_len=8, vocab_size=20)
    with pytest.raises(RequestError, match=f"{field}=21 is not allowed: must be at most 20"):
        small.check([5], SamplingParams(**{field: 21}))


def test_text_outside_the_model_vocabulary_is_refused(codec):
    small = InputProcessor(codec, max_model_len=8, vocab_size=20)
    with pytest.raises(RequestError, match=r"prompt as token ids\[0\]=74.*\[0, 20\)"):
        small.check("h", None)


def test_a_batch_error_names_the_index(inputs):
    with pytest.raises(RequestError, match=r"^prompts\[2\]: prompt_token_ids\[0\]=999") as caught:
        inputs.check_batch(["a", "b", [999]], None)
    assert caught.value.value == 999


def test_a_list_of_params_must_have_one_per_prompt(inputs):
    with pytest.raises(RequestError, match="a list of 1.*one SamplingParams, or 2: one per prompt"):
        inputs.check_batch(["a", "b"], [SamplingParams()])
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert [c.max_tokens for c in inputs.check_batch(["a", "b"], each)] == [1, 2]


@pytest.mark.parametrize("prompt", ["x", {"messages": HI}])
def test_without_a_tokenizer_text_is_refused_with_the_reason(prompt):
    with pytest.raises(RequestError, match="skip_tokenizer_init=True"):
        without_tokenizer().check(prompt, None)
    assert without_tokenizer().check([5], None).token_ids == [5]


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_without_a_tokenizer_what_needs_text_is_refused(field):
    with pytest.raises(RequestError, match=f"{field}=.*skip_tokenizer_init=True"):
        without_tokenizer().check([5], SamplingParams(**{field: ["x"]}))


def test_bad_words_are_spelt_alone_and_after_a_space(inputs, encode):
    request = inputs.admit(inputs.check("x", SamplingParams(bad_words=["no", " yes"])))
    assert request.bad_words == [encode("no"), encode(" no"), encode(" yes")]


def test_the_params_of_a_batch_are_checked_once(inputs, monkeypatch):
    spelt = []
    monkeypatch.setattr(inputs.codec, "encode_word", lambda word: spelt.append(word) or [[5]])
    checked = inputs.check_batch(["a", "b", "c"], SamplingParams(bad_words=["no"]))
    assert [each.bad_words for each in checked] == [[[5]]] * 3
    assert spelt == ["no"]


def test_a_check_in_another_thread_changes_nothing(codec):
    others = SamplingParams(seed=2)

    class Raced(InputProcessor):
        """Another thread has always just prepared its own params."""

        _prepared = property(lambda self: (others, others, []), lambda self, value: None)

    mine = SamplingParams(bad_words=["no"], seed=1)
    checked = Raced(codec, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE).check("x", mine)
    assert (checked.params, checked.bad_words) == (mine, [codec.encode("no"), codec.encode(" no")])


def test_params_that_were_replaced_without_a_check_are_read_as_new_ones(inputs):
    replaced = msgspec.structs.replace(SamplingParams(), stop="ab", top_k=-1, max_tokens=np.int64(3))
    assert inputs.check("x", replaced).params == SamplingParams(stop=["ab"], top_k=0, max_tokens=3)


def test_extra_args_are_taken_where_processors_may_read_them(codec):
    inputs = InputProcessor(codec, max_model_len=8, vocab_size=VOCAB_SIZE, takes_extra_args=True)
    assert inputs.check("x", SamplingParams(extra_args={"a": 1})).params.extra_args == {"a": 1}


def test_seeds_come_from_the_request_or_from_the_engine_and_the_ordinal(inputs, usual_draws):
    given = [None, 5, None]
    admitted = [inputs.admit(inputs.check("x", SamplingParams(seed=seed))) for seed in given]
    assert [request.seed for request in admitted] == [mix(7, 0), 5, mix(7, 2)]


def test_a_negative_seed_is_the_unsigned_one_of_the_same_bits(inputs):
    admitted = [inputs.admit(inputs.check("x", SamplingParams(seed=seed))) for seed in (-1, -(2**63))]
    assert [request.seed for request in admitted] == [2**64 - 1, 2**63]


def test_refused_requests_do_not_move_the_seeds(inputs, usual_draws):
    with pytest.raises(RequestError):
        inputs.check("", None)
    assert inputs.admit(inputs.check("x", None)).seed == mix(7, 0)


def test_end_ids_are_the_checkpoints_unless_ignored(inputs):
    assert inputs.admit(inputs.check("x", None)).eos_token_ids == [EOS]
    assert inputs.admit(inputs.check("x", SamplingParams(ignore_eos=True))).eos_token_ids == []
