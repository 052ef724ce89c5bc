"""Reads the answers to one request: thinking, words and calls.

This is the one place between the dialects and the formats of answers (`rollout_engine.text.formats`).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rollout_engine.serve.chat.tools import RequestTools
from rollout_engine.serve.served import Served
from rollout_engine.text.formats.answer import AnswerFormat, AnswerParts, AnswerPiece, AnswerStream
from rollout_engine.text.formats.choose import answer_format, call_format
from rollout_engine.text.formats.make import THINKING, make_format
from rollout_engine.text.formats.tagged import TaggedFormat

_CLOSING = re.compile(r"</[\w:]+>|\[/\w+\]|<\|?\w+\|>")
"""The tag behind thinking, as the families write it."""


class AnswerReader:
    """Divides the answers to one request.

    Args:
        tools: of the request; None: calls stay text.
        chat_template: of the request; None: the tokenizer's own.
        splits_thinking: whether thinking is a part of its own; False: it stays text.
        is_bound: whether a grammar binds answers from their first token on, so that none begins with thinking.
        skip_special_tokens: whether the texts of answers are without them.
    """

    def __init__(
        self,
        served: Served,
        tools: RequestTools | None,
        chat_template: str | None,
        *,
        splits_thinking: bool,
        is_bound: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._served, self._tools, self._skip_special_tokens = served, tools, skip_special_tokens
        self._is_bound = is_bound or (tools is not None and tools.is_forced)
        self._format = self._find_format(chat_template, splits_thinking=splits_thinking and not self._is_bound)

    @property
    def has_tools(self) -> bool:
        """Whether answers may have calls."""
        return self._tools is not None

    def read(self, prompt_token_ids: Sequence[int], token_ids: list[int], text: str) -> AnswerParts:
        """The parts of a whole answer."""
        if self._format is None:
            return AnswerParts(text=text)
        return self._format.read(token_ids, text, **self._options(prompt_token_ids))

    def stream(self, prompt_token_ids: Sequence[int]) -> AnswerStream:
        """The reader of one answer that is streamed."""
        if self._format is None:
            return _PlainStream()
        return self._format.stream(**self._options(prompt_token_ids))

    def new_call_id(self, name: str, index: int) -> str:
        """An id for the call of a tool, the conversation's number `index`."""
        assert self._format is not None, "an answer with calls"
        return self._format.new_call_id(name, index)

    def count_thinking(self, token_ids: list[int], parts: AnswerParts) -> int:
        """Tokens of an answer that are thinking, with the tags around it."""
        if parts.thinking is None:
            return 0
        codec = self._served.codec
        text = codec.decode(token_ids)
        closing = _CLOSING.search(text, max(text.find(parts.thinking), 0) + len(parts.thinking))
        if closing is None or parts.is_thinking:
            return len(token_ids)
        left = len(text[: closing.end()].encode())
        for number, token_id in enumerate(token_ids):
            if left <= 0:
                return number
            left -= len(codec.bytes_of(token_id))
        return len(token_ids)

    def _options(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        return {
            "prompt_end": "" if self._is_bound else prompt_token_ids,
            "tools": None if self._tools is None else self._tools.tools,
            "skip_special_tokens": self._skip_special_tokens,
        }

    def _find_format(self, chat_template: str | None, *, splits_thinking: bool) -> AnswerFormat | None:
        form, codec = None if self._tools is None else self._tools.form, self._served.codec
        if not splits_thinking:
            return None if form is None else call_format(codec, chat_template, form)
        if chat_template is None:
            found = self._served.answer_format
        else:
            found = answer_format(codec, chat_template, runs_template=False)
        if found is None or (isinstance(found, TaggedFormat) and found.thinking is None):
            return make_format(codec, form, THINKING["think"])
        return found


class _PlainStream:
    """An answer that is all words."""

    def __init__(self) -> None:
        self.parts = AnswerParts()

    def feed(self, token_ids: Sequence[int], text: str) -> list[AnswerPiece]:
        self.parts.text += text
        return [AnswerPiece("text", text)] if text else []

    def end(self) -> list[AnswerPiece]:
        return []


def join_pieces(pieces: Iterable[AnswerPiece]) -> AnswerParts:
    """The answer that was streamed in these pieces."""
    joined = AnswerParts()
    for piece in pieces:
        if piece.kind == "thinking":
            joined.thinking = (joined.thinking or "") + piece.text
        elif piece.kind == "text":
            joined.text += piece.text
        elif piece.call is not None:
            joined.found.append(piece.call)
    return joined
