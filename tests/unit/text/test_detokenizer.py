import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.detokenizer import Detokenizer
from rollout_engine.text.tokenizer import TextCodec

CODEC = TextCodec(byte_tokenizer())


def detokenizer(**params):
    return Detokenizer(CODEC.new_stream(skip_special_tokens=True), SamplingParams(**params))


def run(text, chunk=1, **params):
    """(detokenizer, number of tokens kept, texts seen after each push)."""
    made, ids, kept, seen = detokenizer(**params), CODEC.encode(text), 0, []
    while kept < len(ids) and made.stop is None:
        kept += made.push(ids[kept : kept + chunk])
        seen.append(made.text())
    made.finish()
    return made, kept, seen


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20), chunk=st.integers(1, 5))
@settings(deadline=None)
def test_texts_grow_and_end_in_the_whole(text, chunk):
    made, _, seen = run(text, chunk)
    assert made.text() == text
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:], strict=False))


@given(
    text=st.text("ab漢", max_size=20),
    stops=st.lists(st.text("ab漢", min_size=1, max_size=4), min_size=1, max_size=4),
    chunk=st.integers(1, 5),
    min_tokens=st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_text_is_cut_at_the_stop_string_that_ends_first(text, stops, chunk, min_tokens):
    expected, num_kept, stop = text, len(text.encode()), None
    for end in range(1, len(text) + 1):
        here = [s for s in stops if text[:end].endswith(s)]
        if here and len(text[:end].encode()) >= min_tokens:
            stop = max(here, key=len)
            expected, num_kept = text[: end - len(stop)], len(text[:end].encode())
            break
    made, kept, seen = run(text, chunk, stop=stops, min_tokens=min_tokens)
    assert (made.text(), kept, made.stop) == (expected, num_kept, stop)
    assert all(expected.startswith(early) for early in seen)  # nothing shown is ever taken back


def test_text_that_may_begin_a_stop_string_is_held_back():
    made = detokenizer(stop=["END"])
    seen = []
    for char in "xENyEND":
        made.push(CODEC.encode(char))
        seen.append(made.text())
    assert seen == ["x", "x", "x", "xENy", "xENy", "xENy", "xENy"]
    assert made.stop == "END"


def test_held_text_comes_out_when_the_sequence_ends_otherwise():
    made, _, seen = run("xEN", stop=["END"])
    assert (seen[-1], made.text()) == ("x", "xEN")


def test_a_kept_stop_string_stays_and_what_follows_it_goes():
    made, kept, _ = run("abENDcd", chunk=7, stop=["END"], include_stop_str_in_output=True)
    assert (made.text(), kept, made.stop) == ("abEND", 5, "END")


def test_stop_strings_do_not_count_before_min_tokens():
    made, kept, _ = run("a.b.c.", stop=["."], min_tokens=3)
    assert (made.text(), kept) == ("a.b", 4)


def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end():
    made = detokenizer()
    made.push(CODEC.encode("漢")[:2])
    assert made.text() == ""
    made.finish()
    assert made.text() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("skip, text", [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens_are_skipped_on_request(skip, text):
    made = Detokenizer(CODEC.new_stream(skip_special_tokens=skip), SamplingParams(skip_special_tokens=skip))
    made.push([*CODEC.encode("a"), 2, *CODEC.encode("b")])
    assert made.text() == text


WHOLE = {"skip_special_tokens": False, "stop_token_ids": [2]}


def push_all(ids, chunk, **params):
    made = Detokenizer(CODEC.new_stream(skip_special_tokens=False), SamplingParams(**params), {2})
    for start in range(0, len(ids), chunk):
        assert made.push(ids[start : start + chunk]) == len(ids[start : start + chunk])
    return made


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_the_stop_token_is_cut_from_the_text_unless_it_is_asked_for(chunk):
    ids = [*CODEC.encode("ab"), 2]
    assert push_all(ids, chunk, **WHOLE).text() == "ab"
    assert push_all(ids, chunk, **WHOLE, stop=["zz"]).text() == "ab"
    assert push_all(ids, chunk, **WHOLE, include_stop_str_in_output=True).text() == "ab<eos>"


def test_a_stop_id_before_min_tokens_is_text():
    ids = [*CODEC.encode("a"), 2, *CODEC.encode("b"), 2]
    for stop in (None, ["zz"]):
        assert push_all(ids, 1, **WHOLE, min_tokens=3, stop=stop).text() == "a<eos>b"


def test_no_stop_string_ends_in_the_token_that_stopped_the_sequence():
    made = push_all([*CODEC.encode("xa"), 2], 1, **WHOLE, stop=["a<eos>"])
    made.finish()
    assert (made.text(), made.stop) == ("xa", None)  # and what was held back for it has come out
