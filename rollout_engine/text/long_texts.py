"""Encodes long texts without holding all of their tokens, and refuses those that cannot be short enough at once.

A tokenizer makes some hundred bytes for each character before it returns the first id, takes a second for a million of
them, and holds the interpreter meanwhile, unless it is called for a batch. Both rules below are proved for the parts
that a tokenizer is made of, and hold for no other one:

* `max_chars_per_token`: no token stands for more characters than this. A text with more characters than `most` tokens
  can have is refused before it is encoded.
* `cuts_anywhere`: the ids of a text are those of its pieces, if it is cut behind a letter and before a space, the end
  of a line, or a mark of Chinese or Japanese. Then pieces are encoded one by one, and no more than `most` tokens.
"""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer

LONG_CHARS = 1 << 12
"""Characters of a long text, at least."""
PIECE_CHARS = 1 << 16
"""Characters of a piece, at least; a shorter text is encoded as it is."""
_WINDOW = 1 << 20
"""Characters that are searched for the end of a piece at a time."""
_LETTER, _BREAK = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3", " \n\u3002\u3001\uff0c\uff01\uff1f"
_CUT = re.compile(f"(?<=[{_LETTER}])(?=[{_BREAK}])")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PATTERNS = frozenset(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}",  # Llama 3
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_TAIL}",  # Qwen 2, 2.5 and 3
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|"
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",  # GPT-4o, gpt-oss
    )
)
"""Patterns that divide a text into words, none of whose matches goes over a cut or looks beyond it."""
_BYTES_PER_CHAR_OF_NFC = 2
"""A character of NFC has at most four characters of NFD, twice the bytes that it has; ASCII has one."""


class LongTexts:
    """Properties of one tokenizer, found when the first long text is encoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = list(tokenizer.get_added_tokens_decoder().values())
        is_plain = not any(token.lstrip or token.rstrip or token.single_word for token in added)
        normal, split = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
        self.max_chars_per_token = _max_chars_per_token(tokenizer, normal, split, added) if is_plain else None
        """None: not known."""
        self.cuts_anywhere = is_plain and _cuts_anywhere(normal, split) and _is_uncut(added)
        """Whether a text may be cut at every `_CUT`."""
        self._encoding = threading.Lock()
        """Held for texts that are encoded whole, one at a time: their tokens take gigabytes."""

    def exceeds(self, text: str, most: int) -> bool:
        """Whether a text certainly has more than `most` tokens."""
        return self.max_chars_per_token is not None and len(text) > most * self.max_chars_per_token

    def encode(self, text: str, add_special_tokens: bool, most: int | None) -> tuple[list[int], bool]:
        """Token ids of a text, and whether these are all; of one with more than `most` tokens they may be the first."""
        if not self.cuts_anywhere:
            with self._encoding:
                return _encode_text(self._tokenizer, text, add_special_tokens), True
        begin, end = self._special_ids() if add_special_tokens else ([], [])
        token_ids, num_read = begin, 0
        for piece in pieces(text):
            token_ids += _encode_text(self._tokenizer, piece, False)
            num_read += len(piece)
            if most is not None and len(token_ids) > most and num_read < len(text):
                return token_ids, False
        return token_ids + end, True

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer puts before and behind every text."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]


def _encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text, as those of a batch: other threads run meanwhile."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def pieces(text: str) -> Iterator[str]:
    """A text cut at some of its `_CUT`s, into pieces of `PIECE_CHARS` characters or more."""
    start = 0
    while start < len(text):
        end = _next_cut(text, start + PIECE_CHARS)
        yield text[start:end]
        start = end


def _next_cut(text: str, start: int) -> int:
    while start < len(text):
        found = _CUT.search(text, start, start + _WINDOW)
        if found is not None and found.start() < start + _WINDOW:
            return found.start()
        start += _WINDOW
    return len(text)


def _parts(part: Any) -> list[dict[str, Any]] | None:
    """A normaliser or a pre-tokenizer as the fields of its steps; None for one that cannot be read."""
    if part is None:
        return []
    try:
        fields = json.loads(part.__getstate__())
    except (TypeError, ValueError, AttributeError):  # one that is written in Python
        return None
    return fields.get("normalizers") or fields.get("pretokenizers") or [fields]


def _max_chars_per_token(
    tokenizer: Tokenizer,
    normal: list[dict[str, Any]] | None,
    split: list[dict[str, Any]] | None,
    added: list[AddedToken],
) -> int | None:
    if normal is None or split is None or type(tokenizer.model).__name__ != "BPE":
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    keeps = all(_keeps_characters(each) for each in split)
    has_alphabet = all(chr(code) in vocabulary for code in _byte_level_codes())
    has_bytes = tokenizer.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    longest = max(map(len, [*vocabulary, *(token.content for token in added)]))
    if keeps and any(each["type"] == "ByteLevel" for each in split) and has_alphabet:
        kinds = {each["type"] for each in normal}
        return longest * _BYTES_PER_CHAR_OF_NFC if kinds == {"NFC"} else longest if not kinds else None
    if keeps and has_bytes and all(_keeps_or_adds(each) for each in normal):
        return longest
    return None


def _byte_level_codes() -> list[int]:
    """Characters that stand for the 256 bytes in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [0x100 + i for i in range(256 - len(printable))]


def _keeps_characters(step: dict[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer loses no character."""
    if step["type"] in ("ByteLevel", "Metaspace", "Digits"):
        return True
    return step["type"] in ("Split", "Punctuation") and step.get("behavior") != "Removed"


def _keeps_or_adds(step: dict[str, Any]) -> bool:
    """Whether a normaliser of SentencePiece's kind has no fewer characters behind it than before."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1 and len(step["content"]) >= 1
    return bool(step["type"] == "Prepend")


def _cuts_anywhere(normal: list[dict[str, Any]] | None, split: list[dict[str, Any]] | None) -> bool:
    if not split or any(each["type"] != "NFC" for each in normal or ()) or normal is None:
        return False
    *before, last = split
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not before:
        return bool(last["use_regex"])
    return not last["use_regex"] and all(
        each["type"] == "Split"
        and each["pattern"].get("Regex") in _PATTERNS
        and each["behavior"] == "Isolated"
        and not each["invert"]
        for each in before
    )


def _is_uncut(added: list[AddedToken]) -> bool:
    """Whether no added token, which is found before anything else, holds a place at which texts are cut."""
    breaks = set(_BREAK)
    return not any(breaks & set(token.content) for token in added)
