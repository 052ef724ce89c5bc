import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.text_stream import REPLACEMENT, ByteStream, WindowStream
from rollout_engine.text.tokenizer import TextCodec


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with U+2581, unknown characters are spelled in bytes, a first space is stripped."""
    words = ["\u2581", "\u2581he", "llo", "\u2581the", "a", "b", "e", "é", "漢", "\u2581\u2581", ".", "\u2581é"]
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *all_bytes, *words])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level_with_merges() -> PreTrainedTokenizerFast:
    """Byte-level, with tokens that hold the end of one character and the start of the next, and odd added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(a + b for a in alphabet[::9] for b in alphabet[::11])]
    vocab = {token: i for i, token in enumerate(["<unk>", *pieces])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<｜end▁of▁sentence｜>", special=True), AddedToken("<eos>", special=True)])
    inner.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("→漢", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


BYTE_LEVEL = {"bytes": TextCodec(byte_tokenizer()), "merges": TextCodec(byte_level_with_merges())}
SENTENCEPIECE = TextCodec(sentencepiece_like())
FIRST_BYTE, FIRST_WORD = 3, 259


def full_decode(codec, ids, skip):
    return codec.hf.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def stream_decode(codec, ids, skip):
    """(text, pieces) with one token a push."""
    stream = codec.new_stream(skip_special_tokens=skip)
    pieces = [stream.push([token_id]) for token_id in ids]
    return "".join(pieces) + stream.flush(), pieces


def test_byte_level_tokenizers_get_the_byte_stream_and_others_the_window():
    assert isinstance(BYTE_LEVEL["bytes"].new_stream(skip_special_tokens=True), ByteStream)
    assert isinstance(SENTENCEPIECE.new_stream(skip_special_tokens=True), WindowStream)


@pytest.mark.parametrize("codec", [BYTE_LEVEL["bytes"], SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_bytes_of_tokens_end_to_end_are_the_texts(codec):
    text = "é漢 é the 漢"
    ids = codec.encode(text, add_special_tokens=False)
    assert b"".join(map(codec.bytes_of, ids)).decode() == text
    assert codec.bytes_of(len(codec.hf) + 7) == b""


def test_bytes_of_tokens_that_are_bytes_are_these():
    ids = [FIRST_WORD + 2, *(FIRST_BYTE + byte for byte in "字".encode()), FIRST_WORD + 1]
    assert b"".join(map(SENTENCEPIECE.bytes_of, ids)).decode() == "llo字 he"


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", BYTE_LEVEL)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_stream_equals_the_full_decode_of_any_ids(kind, data, skip):
    codec = BYTE_LEVEL[kind]
    ids = data.draw(st.lists(st.integers(0, len(codec.hf) + 3), max_size=40))  # a model's vocabulary may be padded
    assert stream_decode(codec, ids, skip)[0] == full_decode(codec, ids, skip)


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30), skip=st.booleans()
)  # no special token
@settings(max_examples=200, deadline=None)
def test_no_piece_of_valid_text_holds_half_a_character(text, skip):
    codec = BYTE_LEVEL["bytes"]
    decoded, pieces = stream_decode(codec, codec.encode(text), skip)
    assert decoded == text
    assert "".join(pieces) == text  # nothing had to be flushed
    for end in range(len(pieces)):
        assert text.startswith("".join(pieces[:end]))


@given(text=st.text(max_size=12), cuts=st.lists(st.integers(1, 4), max_size=30))
@settings(max_examples=100, deadline=None)
def test_tokens_pushed_together_give_the_same_text(text, cuts):
    for codec in (*BYTE_LEVEL.values(), SENTENCEPIECE):
        ids = [3 + byte for byte in text.encode()]
        stream, pieces, rest = codec.new_stream(skip_special_tokens=True), [], ids
        for cut in cuts:
            pieces.append(stream.push(rest[:cut]))
            rest = rest[cut:]
        pieces.append(stream.push(rest))
        assert "".join(pieces) + stream.flush() == stream_decode(codec, ids, True)[0]


def byte_run(text):
    return [FIRST_BYTE + byte for byte in text.encode()]


sentencepiece_ids = st.lists(
    st.one_of(
        st.integers(FIRST_WORD, FIRST_WORD + 11).map(lambda token_id: [token_id]),
        st.sampled_from([[0], [1], [2]]),
        st.text(min_size=1, max_size=3).map(byte_run),
    ),
    max_size=12,
).map(lambda parts: sum(parts, []))


@given(ids=sentencepiece_ids, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_stream_equals_the_full_decode_where_byte_runs_are_valid(ids, skip):
    text, pieces = stream_decode(SENTENCEPIECE, ids, skip)
    assert text == full_decode(SENTENCEPIECE, ids, skip)
    for end in range(len(pieces)):
        assert text.startswith("".join(pieces[:end]))


@given(ids=st.lists(st.integers(0, 270), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_stream_survives_any_ids(ids, skip):
    text, _ = stream_decode(SENTENCEPIECE, ids, skip)
    assert len(_good(text)) >= len(_good(full_decode(SENTENCEPIECE, ids, skip)))


@pytest.mark.parametrize("text", [f"{REPLACEMENT}\U00010000", f"a{REPLACEMENT}{REPLACEMENT}é", f"{REPLACEMENT} x"])
def test_a_replacement_character_that_the_model_spells_is_a_character(text):
    assert (
        stream_decode(SENTENCEPIECE, byte_run(text), True)[0]
        == text
        == full_decode(SENTENCEPIECE, byte_run(text), True)
    )


def test_characters_before_a_bad_byte_stay():
    ids = [*byte_run("é"), FIRST_BYTE + 0xFF, FIRST_WORD + 1]
    assert stream_decode(SENTENCEPIECE, ids, True)[0] == f"é{REPLACEMENT} he"
    assert full_decode(SENTENCEPIECE, ids, True) == f"{REPLACEMENT * 3} he"


@pytest.mark.parametrize("codec", [BYTE_LEVEL["bytes"], SENTENCEPIECE])
def test_an_unfinished_character_is_held_back_until_the_flush(codec):
    stream = codec.new_stream(skip_special_tokens=True)
    ids = (byte_run("漢") if codec is SENTENCEPIECE else codec.encode("漢"))[:2]
    assert stream.push(ids) == ""
    assert set(stream.flush()) == {REPLACEMENT}


def test_garbage_bytes_cost_no_more_than_text():
    calls = []
    decode = SENTENCEPIECE.decode
    stream = WindowStream(lambda ids: calls.append(len(ids)) or decode(ids), frozenset())
    text = stream.push([FIRST_BYTE + 0xFF] * 500) + stream.flush()
    assert text == REPLACEMENT * 500
    assert max(calls) < 32


def _good(text):
    return text.replace(REPLACEMENT, "")
