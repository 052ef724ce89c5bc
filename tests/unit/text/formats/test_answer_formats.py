"""Each family's answers are divided into thinking, words and calls, whole and in pieces, by tokens and by text."""

import random

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.text.formats.answer import AnswerParts
from rollout_engine.text.formats.choose import answer_format
from rollout_engine.text.formats.families import FAMILIES

from .answers import TOOLS, WHOLE, codec_with, format_of, read_in_pieces, shown, spell, tags_of

BY_TOKENS = [each for each in WHOLE if each[0] in FAMILIES and each[0] != "pythonic"]
"""Answers whose tags count as tokens alone."""
NAMES = [f"{name}-{number}" for number, (name, *_) in enumerate(WHOLE)]


@pytest.mark.quick(18)
@pytest.mark.parametrize("kind", ["tokens", "special", "text"])
@pytest.mark.parametrize("name, prompt, answer, parts", WHOLE, ids=NAMES)
def test_an_answer_is_divided(name, prompt, answer, parts, kind):
    codec = codec_with([] if kind == "text" else tags_of(name), special=kind == "special")
    form, token_ids = format_of(name, codec), codec.encode(answer, add_special_tokens=False)
    text, ids_of_prompt = shown(codec, token_ids), codec.encode(f"Hello.{prompt}", add_special_tokens=False)
    for prompt_end in (ids_of_prompt, f"Hello.{prompt}"):
        assert form.read(token_ids, text, prompt_end=prompt_end, tools=TOOLS) == parts
    whole = shown(codec, token_ids, skip_special_tokens=False)
    assert whole == answer
    assert form.read(token_ids, whole, prompt_end=prompt, tools=TOOLS, skip_special_tokens=False) == parts
    rng = random.Random(answer)
    for _ in range(20):
        assert read_in_pieces(form, token_ids, text, rng, prompt_end=ids_of_prompt, tools=TOOLS) == parts
        shows = {"prompt_end": prompt, "tools": TOOLS, "skip_special_tokens": False}
        assert read_in_pieces(form, token_ids, whole, rng, **shows) == parts


@pytest.mark.parametrize("name, prompt, answer, parts", WHOLE, ids=NAMES)
def test_an_end_token_is_no_part_of_it(name, prompt, answer, parts):
    codec = codec_with(tags_of(name))
    form, token_ids = format_of(name, codec), codec.encode(answer + "<eos>", add_special_tokens=False)
    assert form.read(token_ids, shown(codec, token_ids), prompt_end=prompt, tools=TOOLS) == parts


@pytest.mark.parametrize("name, prompt, answer, parts", WHOLE, ids=NAMES)
def test_without_tools_calls_stay_text(name, prompt, answer, parts):
    codec = codec_with(tags_of(name))
    form, token_ids = format_of(name, codec), codec.encode(answer, add_special_tokens=False)
    found = form.read(token_ids, answer, prompt_end=prompt)
    assert not found.found and found.thinking == parts.thinking
    assert all(call.name in found.text or name == "harmony" for call in parts.calls)


@pytest.mark.parametrize("name, prompt, answer, parts", BY_TOKENS)
def test_tags_that_prose_spells_are_words_if_the_tokenizer_has_them_as_tokens(name, prompt, answer, parts):
    codec = codec_with(tags_of(name))
    form, token_ids = format_of(name, codec), spell(codec, answer)
    found = form.read(token_ids, shown(codec, token_ids), prompt_end="", tools=TOOLS)
    assert found == AnswerParts(None, answer)
    assert read_in_pieces(form, token_ids, answer, random.Random(0), tools=TOOLS) == found


@pytest.mark.parametrize("name, prompt, answer, parts", WHOLE, ids=NAMES)
def test_an_answer_that_is_cut_anywhere_is_read_alike_whole_and_in_pieces(name, prompt, answer, parts):
    codec = codec_with(tags_of(name))
    form, token_ids = format_of(name, codec), codec.encode(answer, add_special_tokens=False)
    rng = random.Random(name)
    for end in rng.sample(range(len(token_ids)), min(len(token_ids), 25)):
        cut = token_ids[:end]
        whole = form.read(cut, shown(codec, cut), prompt_end=prompt, tools=TOOLS)
        assert read_in_pieces(form, cut, shown(codec, cut), rng, prompt_end=prompt, tools=TOOLS) == whole


@pytest.mark.parametrize("name, prompt, answer, parts", BY_TOKENS)
def test_a_call_that_is_closed_is_returned_before_the_end(name, prompt, answer, parts):
    codec = codec_with(tags_of(name))
    token_ids = codec.encode(answer, add_special_tokens=False)
    stream = format_of(name, codec).stream(prompt_end=prompt, tools=TOOLS)
    pieces = stream.feed(token_ids, shown(codec, token_ids))
    assert [piece.call for piece in pieces if piece.call is not None] == parts.calls
    assert not [piece for piece in stream.end() if piece.call is not None]


def test_no_piece_of_a_stream_is_taken_back():
    """Every beginning of a stream's pieces is a beginning of the whole's parts, wherever the answer is cut."""
    rng = random.Random(7)
    for name, prompt, answer, _ in WHOLE:
        codec = codec_with(tags_of(name))
        form, token_ids = format_of(name, codec), codec.encode(answer, add_special_tokens=False)
        whole = form.read(token_ids, shown(codec, token_ids), prompt_end=prompt, tools=TOOLS)
        decoder, stream = codec.new_stream(skip_special_tokens=True), form.stream(prompt_end=prompt, tools=TOOLS)
        said = {"thinking": "", "text": ""}
        calls = 0
        for token_id in token_ids:
            for piece in stream.feed([token_id], decoder.push([token_id]) if rng.random() < 2 else ""):
                if piece.call is not None:
                    assert piece.call == whole.calls[calls]
                    calls += 1
                else:
                    said[piece.kind] += piece.text
            assert (whole.thinking or "").startswith(said["thinking"]) and whole.text.startswith(said["text"])


def test_an_unknown_name_is_refused_and_a_template_without_either_has_no_format():
    codec = codec_with([])
    with pytest.raises(RequestError, match="tool_format='json' is not allowed"):
        answer_format(codec, None, "json")
    codec.hf.chat_template = "{{ messages[0].content }}"
    assert answer_format(codec) is None
    codec.hf.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        answer_format(codec)
