"""Token ids to text, a few at a time, never half a character.

What has been returned is final. The concatenation of everything returned, `flush` included, equals the decoding of all
ids at once, with one exception: where a tokenizer spells characters as a run of byte tokens (`<0xE6>`) and a run is not
valid UTF-8, a one-shot decode loses the run's valid characters too; here those already returned stay.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_HELD = 4
"""Bad characters at the end that more bytes may still make good: all but the last byte of a UTF-8 character, and before
them one leading space, itself a byte token, which the decoder will strip."""
_MAX_PENDING = 8
"""Tokens after which a window that still ends in bad bytes is cut, so that garbage costs no more than text."""


class TextStream(Protocol):
    """Decodes one completion."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` complete; bytes of an unfinished character are held back."""

    def flush(self) -> str:
        """What was held back, now that nothing follows: U+FFFD for an unfinished character."""


class TokenBytes(dict[int, bytes]):
    """Id -> the bytes it stands for in a byte-level vocabulary, filled as ids are met. Unknown ids are empty."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer, self._skipped = tokenizer, skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        self[token_id] = found = _bytes_of(token or "")
        return found


class ByteStream:
    """For byte-level tokenizers: bytes from a table through one incremental UTF-8 decoder."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream`."""
        table = self._token_bytes
        return self._utf8.decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """See `TextStream`."""
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """For every other tokenizer: decodes a short window, whose head only gives context (such as leading spaces).

        ids    ... | context | pending |        each push appends to pending
        text   ... | returned | new    |        new = decode(context + pending) without decode(context)

    Once pending decodes to whole characters it becomes the next context.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int]) -> None:
        self._decode, self._skipped = decode, skipped
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_returned = 0
        """Characters of the pending text already returned."""

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream`."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        """See `TextStream`."""
        return self._pending_text()[self._num_returned :]

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        num_bad = len(text) - len(text.rstrip(REPLACEMENT))
        if num_bad and self._ends_in_spelt_replacement():
            num_bad = 0
        end = len(text) - min(num_bad, _MAX_HELD)
        new = text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        if text and not num_bad:
            self._advance(len(self._pending))
        elif len(self._pending) > _MAX_PENDING and self._ends_in_bad_bytes(num_bad):
            self._advance(len(self._pending) - _MAX_HELD)
        return new

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text) and not self._is_spoiled(text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)  # a bad byte spoiled the whole run it continues

    def _is_spoiled(self, text: str) -> bool:
        """Whether a U+FFFD that ends the context has become three bad bytes in `text`."""
        if not self._context_text.endswith(REPLACEMENT):
            return False
        return _num_leading(text[len(self._context_text) :]) > _num_leading(self._decode(self._pending))

    def _ends_in_spelt_replacement(self) -> bool:
        """Whether the last character is a U+FFFD that its own three byte tokens spell: a good character like any."""
        last = self._pending[-3:]
        alone = [self._decode([token_id]) for token_id in last]
        return alone == [REPLACEMENT] * 3 and self._decode(last) == REPLACEMENT

    def _ends_in_bad_bytes(self, num_bad: int) -> bool:
        last = self._decode(self._pending[-_MAX_HELD:])
        return num_bad > _MAX_HELD and last == REPLACEMENT * _MAX_HELD

    def _advance(self, num_tokens: int) -> None:
        self._context, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        self._context_text = self._decode(self._context)
        self._num_returned = 0


def _num_leading(text: str) -> int:
    return len(text) - len(text.lstrip(REPLACEMENT))


def _bytes_of(token: str) -> bytes:
    """A token of the byte-level alphabet as bytes; one with other characters (an added token) as its own UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 are the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
