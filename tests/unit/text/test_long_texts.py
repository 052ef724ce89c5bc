"""Long texts are encoded in pieces to the same ids, and refused by their characters only if they are too long."""

import random
import threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from rollout_engine.testing import byte_tokenizer
from rollout_engine.text import long_texts
from rollout_engine.text.long_texts import LongTexts, pieces
from rollout_engine.text.tokenizer import TextCodec

WORDS = [
    *(
        "the",
        "Then",
        "naïve",
        "don't",
        "I'LL",
        "日本",
        "世界",
        "はい",
        "안녕",
        "x1",
        "2048",
        "e\u0301t",
        "\u1e9b\u0323",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n",
        "\t",
        "。",
        "，",
        "!",
        "/",
        "...",
        "'",
        "<|im_end|>",
        "\r\n",
        "、",
        "\u0301",
        "a",
        "B",
    ),
]


def text_of(seed, length):
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) for _ in range(length))


def byte_level(pattern=None, normalizer=None):
    """A tokenizer with merges across everything that its pattern leaves together."""
    made = Tokenizer(models.BPE())
    if pattern is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    made.normalizer, made.decoder = normalizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([text_of(seed, 400) for seed in range(8)], trainer)
    made.add_special_tokens(["<|im_end|>", "<bos>"])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))])
    return made


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(long_texts, "PIECE_CHARS", 7)
    monkeypatch.setattr(long_texts, "_WINDOW", 11)


@pytest.mark.quick(1)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
@pytest.mark.parametrize("pattern", [None, *sorted(long_texts._PATTERNS)], ids=["GPT-2", "a", "b", "c"])
def test_pieces_have_the_ids_of_the_whole(small_pieces, pattern, normalizer):
    tokenizer = byte_level(pattern, normalizer)
    texts = LongTexts(tokenizer)
    assert texts.cuts_anywhere
    for seed in range(100, 160):
        text = text_of(seed, 120)
        assert len(list(pieces(text))) > 1
        for adds in (True, False):
            assert texts.encode(text, adds, None) == (tokenizer.encode(text, add_special_tokens=adds).ids, True)


def test_no_more_pieces_are_encoded_than_the_tokens_that_are_wanted(small_pieces):
    texts = LongTexts(byte_level())
    some, is_whole = texts.encode("word " * 10_000, True, 20)
    assert 20 < len(some) < 40 and not is_whole


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
def test_no_text_has_fewer_tokens_than_its_characters_allow(normalizer):
    tokenizer = byte_level(None, normalizer)
    texts = LongTexts(tokenizer)
    assert texts.max_chars_per_token is not None
    for text in [
        *(text_of(seed, 50) for seed in range(50)),
        "e\u0301" * 99,
        "\u03b1\u0314\u0300\u0345" * 99,
        " " * 999,
    ]:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert not texts.exceeds(text, num_tokens)
    assert texts.exceeds("x" * 10_000, 10)


def wordpiece():
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def with_token(token):
    made = byte_level()
    made.add_tokens([token])
    return made


UNKNOWN = {
    "words become one unknown token": wordpiece,
    "a normaliser removes characters": lambda: byte_level(None, normalizers.StripAccents()),
    "a token takes the spaces behind it": lambda: with_token(AddedToken("<x>", rstrip=True)),
    "bytes are missing": lambda: Tokenizer(models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_tokenizers_of_which_nothing_is_proved_encode_the_whole_text(make):
    texts = LongTexts(make())
    assert texts.max_chars_per_token is None and not texts.exceeds("a" * 10**6, 1)


@pytest.mark.parametrize(
    "make",
    [
        wordpiece,
        lambda: byte_level(r"\w+\s\w+|\s+|."),
        lambda: with_token(AddedToken("the end")),
        lambda: with_token(AddedToken("<x>", rstrip=True)),
        lambda: byte_level(None, normalizers.Lowercase()),
    ],
)
def test_tokenizers_that_look_over_a_cut_encode_in_one_piece(small_pieces, make):
    tokenizer = make()
    texts, text = LongTexts(tokenizer), text_of(1, 90) + "the end of it"
    assert not texts.cuts_anywhere
    assert texts.encode(text, False, 1) == (tokenizer.encode(text, add_special_tokens=False).ids, True)


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_read(verb):
    codec, text, ended, num_runs = TextCodec(byte_tokenizer()), "word " * 100_000, threading.Event(), 0
    given = text if verb == "encode" else codec.encode(text)

    def read():
        getattr(codec, verb)(given)
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()  # which waits for a moment of the thread's
    while not ended.wait(0.001):
        num_runs += 1
    thread.join()
    assert num_runs > 3


def test_a_text_without_any_cut_is_one_piece(small_pieces):
    assert list(pieces("1234567890" * 9)) == ["1234567890" * 9]
