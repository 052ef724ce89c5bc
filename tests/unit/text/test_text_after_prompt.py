"""The text of a completion is decode(prompt + completion) beyond decode(prompt), whatever the tokenizer and chunks."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.detokenizer import Detokenizer
from rollout_engine.text.text_stream import REPLACEMENT
from rollout_engine.text.tokenizer import TextCodec

SPACE = "\u2581"
WORDS = [SPACE, f"{SPACE}he", "he", "llo", f"{SPACE}the", "a", "b", "é", "漢", f"{SPACE}{SPACE}", ".", f"{SPACE}é"]
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(inner, decoder, **parts):
    """A fast tokenizer over SPECIALS, BYTES and WORDS, in this order."""
    made = Tokenizer(inner)
    made.decoder = decoder
    for name, part in parts.items():
        setattr(made, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def bpe():
    vocab = {token: i for i, token in enumerate([*SPECIALS, *BYTES, *WORDS])}
    return models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", ignore_merges=True)


def llama_2():
    """As Llama 2's fast tokenizer: a normalizer prepends U+2581, the decoder strips one space."""
    words = decoders.Replace(SPACE, " ")
    decoder = decoders.Sequence([words, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return sentencepiece(bpe(), decoder, normalizer=normalizer)


def metaspace():
    """As T5's and XLM's, with bytes for what is not in the vocabulary."""
    pieces = [(token, -1.0) for token in [*SPECIALS, *BYTES, *WORDS]]
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(SPACE)])
    inner = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    return sentencepiece(inner, decoder, pre_tokenizer=pre_tokenizers.Metaspace(SPACE))


def word_pieces():
    """As BERT's: the decoder puts a space before all that does not begin with ##."""
    vocab = {token: i for i, token in enumerate([*SPECIALS, "he", "##llo", "a", "##b", ".", "漢"])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


SPELT = {"llama 2": TextCodec(llama_2()), "metaspace": TextCodec(metaspace())}
CODECS = SPELT | {"byte level": TextCodec(byte_tokenizer()), "word pieces": TextCodec(word_pieces())}
FIRST_BYTE = len(SPECIALS)


def decode(codec, ids, skip):
    return codec.hf.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def stream_text(codec, prompt, completion, skip=True, sizes=(1,)):
    """What a stream gives for `completion`, pushed `sizes` at a time, over and over."""
    stream = codec.new_stream(skip_special_tokens=skip, prompt_token_ids=prompt)
    text, start, turn = "", 0, 0
    while start < len(completion):
        text += stream.push(completion[start : start + sizes[turn % len(sizes)]])
        start, turn = start + sizes[turn % len(sizes)], turn + 1
    return text + stream.flush()


def byte_run(text):
    return [FIRST_BYTE + byte for byte in text.encode()]


def runs_are_valid(codec, ids, skip):
    """Whether every run of byte tokens is UTF-8: one-shot decoding loses the good characters of others."""
    shown = [i for i in ids if not (skip and i < FIRST_BYTE)]
    run = bytearray()
    for token_id in [*shown, -1]:
        if FIRST_BYTE <= token_id < FIRST_BYTE + 256:
            run.append(token_id - FIRST_BYTE)
        else:
            try:
                run.decode()
            except UnicodeDecodeError:
                return False
            run.clear()
    return True


parts = st.one_of(
    st.integers(FIRST_BYTE + 256, FIRST_BYTE + 256 + len(WORDS) - 1).map(lambda token_id: [token_id]),
    st.sampled_from([[0], [1], [2], [1, 1], [0xFFFF]]),  # the last: a model's vocabulary may be padded
    st.text(min_size=1, max_size=8).map(byte_run),
    st.text("漢é\U00010000 ", min_size=1, max_size=12).map(byte_run),
)
ids_of_text = st.lists(parts, max_size=10).map(lambda found: sum(found, []))


@st.composite
def cut_ids(draw):
    """(prompt, completion): one text cut anywhere, also inside a character."""
    ids = draw(ids_of_text)
    cut = draw(st.integers(0, len(ids)))
    return ids[:cut], ids[cut:]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", SPELT)
@given(pair=cut_ids(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=150)
def test_a_completion_is_what_follows_the_prompt_where_characters_are_spelt(kind, pair, skip, sizes):
    codec, (prompt, completion) = SPELT[kind], pair
    whole, before = (decode(codec, ids, skip) for ids in (prompt + completion, prompt))
    streamed = stream_text(codec, prompt, completion, skip, sizes)
    if whole.startswith(before) and runs_are_valid(codec, prompt + completion, skip):
        assert streamed == whole[len(before) :]
    else:  # the prompt ends inside a character: the completion begins with it
        cut = next(n for n in range(1, 5) if runs_are_valid(codec, prompt[:-n], skip))
        assert streamed == whole[len(decode(codec, prompt[:-cut], skip)) :]


def test_two_bytes_of_a_surrogate_that_end_a_prompt_are_not_said_by_the_completion():
    codec = CODECS["byte level"]
    prompt = codec.hf.convert_tokens_to_ids(["í", "¡"])  # the bytes ED A1
    for completion in ([], codec.hf.convert_tokens_to_ids(["a"]), codec.hf.convert_tokens_to_ids(["¿", "a"])):
        whole, before = (decode(codec, ids, False) for ids in (prompt + completion, prompt))
        assert stream_text(codec, prompt, completion) == whole[len(before) :]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["byte level", "word pieces"])
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=150)
def test_a_completion_of_any_ids_is_what_follows_the_prompt_of_any_ids(kind, data, skip, sizes):
    codec = CODECS[kind]
    some = st.lists(st.integers(0, len(codec.hf) + 2), max_size=12)
    text = st.text(max_size=6).map(codec.encode)
    prompt, completion = (data.draw(st.one_of(some, text)) for _ in range(2))
    whole, before = (decode(codec, ids, skip) for ids in (prompt + completion, prompt))
    streamed = stream_text(codec, prompt, completion, skip, sizes)
    if whole.startswith(before):
        assert streamed == whole[len(before) :]
    else:
        assert streamed == whole[len(before.removesuffix(REPLACEMENT)) :]


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12), cut=st.integers(0, 40))
@example(text="a漢b", cut=2)
@example(text="0\x80\U00010000\U00010000\U00010000", cut=14)
@settings(max_examples=80)
def test_a_character_that_the_prompt_begins_belongs_to_the_completion(text, cut):
    for codec in (CODECS["byte level"], *SPELT.values()):
        ids = byte_run(text) if codec in SPELT.values() else codec.encode(text)
        prompt, completion = ids[:cut], ids[cut:]
        whole_characters = text.encode()[:cut].decode(errors="ignore")
        expected = text.removeprefix(whole_characters)
        if completion:
            streamed = stream_text(codec, prompt, completion)
            assert streamed == expected or text.startswith(" ") and not whole_characters.strip(" ")


@pytest.mark.parametrize("prompt", [[FIRST_BYTE + 0xE6], [*byte_run("漢"), FIRST_BYTE + 0xE6, FIRST_BYTE + 0xBC]])
def test_an_unfinished_character_of_the_prompt_is_not_shown_again(prompt):
    he = FIRST_BYTE + 256 + 2
    for codec in SPELT.values():
        assert stream_text(codec, prompt, [he]) == "he"
        assert stream_text(codec, prompt, []) == ""


@given(pair=cut_ids(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), junk=st.lists(st.integers(0, 270)))
@settings(max_examples=80)
def test_any_ids_stream_alike_whatever_is_pushed_at_a_time(pair, sizes, junk):
    prompt, completion = pair[0] + junk, junk + pair[1]
    for codec in CODECS.values():
        together = stream_text(codec, prompt, completion, sizes=sizes)
        assert together == stream_text(codec, prompt, completion)


@pytest.mark.parametrize("kind", ["llama 2", "metaspace"])
def test_the_first_word_keeps_its_space_and_a_stop_string_finds_it(kind):
    codec = SPELT[kind]
    prompt = codec.encode("he")
    the = FIRST_BYTE + 256 + WORDS.index(f"{SPACE}the")
    assert stream_text(codec, prompt, [the]) == " the"
    assert stream_text(codec, [], [the]) == "the"  # nothing before it
    stream = codec.new_stream(skip_special_tokens=True, prompt_token_ids=prompt)
    text = Detokenizer(stream, SamplingParams(stop=[" the"]))
    text.push([the])
    assert (text.text(), text.stop) == ("", " the")


def test_the_start_of_a_stream_costs_no_more_for_a_long_prompt():
    codec, num_read = SPELT["llama 2"], []

    class Counted(list):
        def __reversed__(self):
            return (num_read.append(i) or i for i in super().__reversed__())

    for ids in (byte_run("漢" * 10_000), [FIRST_BYTE + 0xFF] * 10_000):
        assert stream_text(codec, Counted(ids), byte_run("漢") + [FIRST_BYTE + 256 + 2]).endswith("漢he")
    assert len(num_read) < 100
    assert stream_text(CODECS["byte level"], Counted([5] * 10_000), [74]) == "h"
    assert len(num_read) < 100


@pytest.mark.parametrize("spaces, text", [(True, " <s> </s> a <s>"), (False, " <s></s> a <s>")])
def test_spaces_between_special_tokens_can_be_left_out(spaces, text):
    codec = CODECS["word pieces"]
    options = dict(skip_special_tokens=False, spaces_between_special_tokens=spaces, prompt_token_ids=[3])
    for size in (1, 4):
        stream = codec.new_stream(**options)
        ids = [1, 2, 5, 1]
        assert "".join(stream.push(ids[i : i + size]) for i in range(0, 4, size)) + stream.flush() == text
