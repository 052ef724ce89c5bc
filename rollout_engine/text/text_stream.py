"""Decodes token ids to text, a few at a time, never returning half a character.

The text of a completion is the decoded text of prompt and completion together, beyond that of the prompt alone:
`decode(prompt + completion)[len(decode(prompt)):]`. Hence a first word keeps its space. Text that has been returned is
final, and everything returned, `flush` included, adds up to that text, whatever was pushed at a time. Two cases differ:

* A prompt that ends inside a character: if the completion finishes the character, decode(prompt), which ends in
  U+FFFD, is no prefix. The character then belongs to the completion, whose text begins with it.
* A tokenizer that spells characters as a run of byte tokens (`<0xE6>`), and a run that is not valid UTF-8: a one-shot
  decode loses the run's valid characters too; here those already returned, or in the prompt, stay.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, product
from types import MappingProxyType
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_HELD = 4
"""Most bad characters at the end that more bytes may still complete: all but the last byte of a UTF-8 character, and
before them one leading space, itself a byte token, which the decoder will strip."""
_MAX_PENDING = 8
"""Tokens after which a window that still ends in bad bytes is cut, so that invalid bytes cost no more than text."""
_PROMPT_TAIL = 12
"""Tokens read at a prompt's end: up to 3 bytes of a character cut off on the left, up to 3 of an unfinished one on the
right, and some between them."""
_MAX_UNFINISHED = 3
"""Most bytes that an unfinished UTF-8 character has."""
_NO_TOKENS: Mapping[int, str] = MappingProxyType({})


class TextStream(Protocol):
    """Decodes the tokens of one completion."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text they complete; bytes of an unfinished character are held back."""

    def flush(self) -> str:
        """Return the text held back, at the end of the completion: U+FFFD for an unfinished character."""


class TokenBytes(dict[int, bytes]):
    """Bytes of each token id of a byte-level vocabulary, filled on first use. Unknown ids have none."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer, self._skipped = tokenizer, skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        self[token_id] = found = _bytes_of(token or "")
        return found


class ByteStream:
    """Decodes for byte-level tokenizers: bytes from a table through one incremental UTF-8 decoder."""

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int] = ()) -> None:
        """Decode the ids that follow `prompt`."""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt):
            tail = token_bytes[token_id] + tail
            if len(tail) >= _MAX_UNFINISHED or tail[-1:] < b"\x80" and tail:
                break
        self._utf8.decode(tail)
        self._unfinished_text = self._utf8.getstate()[0].decode(errors="replace")
        """U+FFFD for the character that the prompt leaves unfinished, until something is returned. Two of them for the
        first two bytes of a surrogate, which Python's decoder holds back as well."""

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._token_bytes
        text = self._utf8.decode(b"".join([table[token_id] for token_id in token_ids]))
        return self._without_prompts_character(text) if self._unfinished_text else text

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        return self._without_prompts_character(text) if self._unfinished_text else text

    def _without_prompts_character(self, text: str) -> str:
        """Return the first text without the U+FFFD that stands for the prompt's unfinished character."""
        unfinished = self._unfinished_text
        if text:
            self._unfinished_text = ""
        return text.removeprefix(unfinished)


class WindowStream:
    """Decodes for every other tokenizer: a short window, whose head only gives context (such as leading spaces).

        ids    ... | context | pending |        each push appends to pending
        text   ... | returned | new    |        new = decode(context + pending) without decode(context)

    Once pending decodes to whole characters it becomes the next context. The first context is the end of the prompt;
    bytes of a character that the prompt leaves unfinished are the first pending ones.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: frozenset[int],
        prompt: Sequence[int] = (),
        unspaced: Mapping[int, str] = _NO_TOKENS,
    ) -> None:
        """Decode the ids that follow `prompt`. An id of `unspaced` right after another has exactly its text there."""
        self._decode, self._skipped, self._unspaced = decode, skipped, unspaced
        self._prompt: Sequence[int] | None = prompt
        """The prompt's ids; None once they have been read, at the first token."""
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_returned = 0
        """Characters of the pending text already returned."""
        self._unfinished_text = ""
        """Text of the pending bytes that belong to the prompt; left out if the pending text begins with it."""
        self._follows_unspaced = False

    def push(self, token_ids: Sequence[int]) -> str:
        if self._prompt is not None:
            self._read_prompt(self._prompt)
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        text = self._pending_text()
        return text[self._first_new(text) :]

    def _read_prompt(self, prompt: Sequence[int]) -> None:
        tail = list(islice((i for i in reversed(prompt) if i not in self._skipped), _PROMPT_TAIL))[::-1]
        self._prompt = None
        start, end = self._whole_characters(tail)
        self._context, self._pending = tail[start:end], tail[end:]
        self._context_text = self._decode(self._context)
        self._unfinished_text = self._pending_text()
        self._follows_unspaced = bool(tail) and tail[-1] in self._unspaced

    def _whole_characters(self, tail: list[int]) -> tuple[int, int]:
        """Return the start of the first whole character in the `tail` of a prompt, and the end of the last one."""
        starts = range(_MAX_UNFINISHED + 1 if len(tail) == _PROMPT_TAIL else 1)
        ends = range(len(tail), max(len(tail) - _MAX_UNFINISHED, 0) - 1, -1)
        for end, start in product(ends, starts):
            if REPLACEMENT not in self._decode(tail[start:end]):
                return start, end
        clean = (end for end in ends if not self._decode(tail[:end]).endswith(REPLACEMENT))
        return 0, next(clean, len(tail))

    def _push_one(self, token_id: int) -> str:
        if self._unspaced:
            follows, self._follows_unspaced = self._follows_unspaced, token_id in self._unspaced
            if follows and self._follows_unspaced:
                return self._push_unspaced(token_id)
        self._pending.append(token_id)
        text = self._pending_text()
        num_bad = len(text) - len(text.rstrip(REPLACEMENT))
        if num_bad and self._ends_in_spelled_replacement():
            num_bad = 0
        end = len(text) - min(num_bad, _MAX_HELD)
        start = self._first_new(text)
        new = text[start:end]
        if new:
            self._num_returned = end
        if text and not num_bad:
            self._advance(len(self._pending))
        elif len(self._pending) > _MAX_PENDING and self._ends_in_bad_bytes(num_bad):
            self._advance(len(self._pending) - _MAX_HELD)
        return new

    def _push_unspaced(self, token_id: int) -> str:
        new = self.flush() + self._unspaced[token_id]
        self._pending.append(token_id)
        self._advance(len(self._pending))
        return new

    def _first_new(self, text: str) -> int:
        """Return the start of the new part of pending `text`: after text that was returned or is the prompt's."""
        if self._num_returned or not text.startswith(self._unfinished_text):
            return self._num_returned
        return len(self._unfinished_text)

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text) and not self._is_spoiled(text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)  # a bad byte made the whole run of byte tokens invalid

    def _is_spoiled(self, text: str) -> bool:
        """Whether a U+FFFD at the end of the context has become three bad bytes in `text`."""
        if not self._context_text.endswith(REPLACEMENT):
            return False
        return _num_leading(text[len(self._context_text) :]) > _num_leading(self._decode(self._pending))

    def _ends_in_spelled_replacement(self) -> bool:
        """Whether the last character is a U+FFFD spelled by its own three byte tokens: a valid character."""
        last = self._pending[-3:]
        alone = [self._decode([token_id]) for token_id in last]
        return alone == [REPLACEMENT] * 3 and self._decode(last) == REPLACEMENT

    def _ends_in_bad_bytes(self, num_bad: int) -> bool:
        last = self._decode(self._pending[-_MAX_HELD:])
        return num_bad > _MAX_HELD and last == REPLACEMENT * _MAX_HELD

    def _advance(self, num_tokens: int) -> None:
        self._context, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        self._context_text = self._decode(self._context)
        self._num_returned, self._unfinished_text = 0, ""


def _num_leading(text: str) -> int:
    return len(text) - len(text.lstrip(REPLACEMENT))


def _bytes_of(token: str) -> bytes:
    """Return a token of the byte-level alphabet as bytes; one with other characters (an added token) in UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
