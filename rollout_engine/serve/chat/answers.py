"""Reads the answers to one request: thinking, words and calls.

This is the one place between the dialects and the forms of answers (`rollout_engine.text.formats`).
"""

import re
from collections.abc import Sequence
from typing import Any

from rollout_engine.serve.chat.answer_parts import AnswerParts, AnswerPiece, join_pieces
from rollout_engine.serve.chat.tools import ToolParser
from rollout_engine.serve.served import Served
from rollout_engine.text.formats.tool_calls import PROMPT_END, opens_thinking

_OPENING, _CLOSING = "<think>", "</think>"
_BEGINS = re.compile(r"\s*<think>")


class AnswerReader:
    """Divides the answers to one request.

    Args:
        tools: finds calls; None: none are asked for.
        splits_thinking: whether thinking is a part of its own; False: it stays text.
        is_bound: whether a grammar binds answers from their first token on, so that none begins with thinking.
    """

    def __init__(
        self, served: Served, tools: ToolParser | None, *, splits_thinking: bool, is_bound: bool = False
    ) -> None:
        self._served, self._tools = served, tools
        self._splits_thinking = splits_thinking and not is_bound and not (tools is not None and tools.is_forced)

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """The form that tools bind answers to; None if they are free."""
        return None if self._tools is None else self._tools.structured_outputs

    @property
    def has_tools(self) -> bool:
        """Whether answers may have calls."""
        return self._tools is not None

    def read(self, prompt_token_ids: Sequence[int], token_ids: list[int], text: str) -> AnswerParts:
        """The parts of a whole answer: those of its stream, joined."""
        if not self._splits_thinking:
            return AnswerParts(None, text, []) if self._tools is None else self.split(prompt_token_ids, token_ids, text)
        stream = self.stream(prompt_token_ids)
        return join_pieces([*stream.feed(token_ids, text), *stream.end()])

    def stream(self, prompt_token_ids: Sequence[int]) -> "AnswerStream":
        """The reader of one answer that is streamed."""
        is_thinking = False
        if self._splits_thinking:
            prompt_end = self._served.codec.decode(list(prompt_token_ids[-PROMPT_END:]))
            is_thinking = bool(opens_thinking(prompt_end))
        return AnswerStream(self, prompt_token_ids, is_thinking=is_thinking, may_think=self._splits_thinking)

    def split(self, prompt_token_ids: Sequence[int], token_ids: list[int], words: str) -> AnswerParts:
        """Calls and other words of an answer, whose `words` are its text without thinking."""
        assert self._tools is not None, "an answer with tools"
        return self._tools.split(prompt_token_ids, token_ids, words)

    def count_thinking(self, token_ids: list[int]) -> int:
        """Tokens of an answer that begins with thinking up to the end of it."""
        codec = self._served.codec
        text = codec.decode(token_ids)
        end = text.find(_CLOSING)
        if end < 0:
            return len(token_ids)
        left = len(text[: end + len(_CLOSING)].encode())
        for number, token_id in enumerate(token_ids):
            if left <= 0:
                return number
            left -= len(codec.bytes_of(token_id))
        return len(token_ids)


class AnswerStream:
    """One answer as it arrives. With tools its words are held until its end: a call among them is no text."""

    def __init__(
        self, reader: AnswerReader, prompt_token_ids: Sequence[int], *, is_thinking: bool, may_think: bool
    ) -> None:
        """`is_thinking`: whether the prompt has opened it. `may_think`: whether it may begin with thinking."""
        self._reader, self._prompt_token_ids = reader, prompt_token_ids
        self._held = ""
        """Text that may belong to the next piece."""
        self._state = "thinking" if is_thinking else "open" if may_think else "words"
        self._is_new = True
        """Whether the state has shown nothing yet, so that line ends do not count."""
        self._has_thought = False
        """Whether thinking was before the words."""
        self._words = ""
        self._token_ids: list[int] = []

    def feed(self, token_ids: Sequence[int], text: str) -> list[AnswerPiece]:
        """The pieces that new tokens and their text complete."""
        self._token_ids += token_ids
        self._held += text
        return self._read(is_last=False)

    def end(self) -> list[AnswerPiece]:
        """The pieces that are left once the answer has ended."""
        pieces = self._read(is_last=True)
        if not self._reader.has_tools:
            return pieces
        parts = self._reader.split(self._prompt_token_ids, self._token_ids, self._words)
        if parts.text:
            pieces.append(AnswerPiece("text", parts.text))
        return [*pieces, *[AnswerPiece("call", call=call) for call in parts.calls]]

    def _read(self, *, is_last: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if self._state == "open":
            self._look_for_opening(is_last=is_last)
        if self._state == "thinking":
            pieces += self._read_thinking(is_last=is_last)
        if self._state == "words" and self._held:
            words = self._held.lstrip("\n") if self._is_new and self._has_thought else self._held
            self._held, self._is_new = "", self._is_new and not words
            if self._reader.has_tools:
                self._words += words
            elif words:
                pieces.append(AnswerPiece("text", words))
        return pieces

    def _look_for_opening(self, *, is_last: bool) -> None:
        found = _BEGINS.match(self._held)
        if found is not None:
            self._state, self._held = "thinking", self._held[found.end() :]
        elif is_last or not _OPENING.startswith(self._held.lstrip()):
            self._state = "words"

    def _read_thinking(self, *, is_last: bool) -> list[AnswerPiece]:
        text, mark, rest = self._held.partition(_CLOSING)
        if mark or is_last:
            shown, self._held = text.rstrip("\n"), rest
        else:
            shown = _without_end(text)
            self._held = text[len(shown) :]
        if self._is_new:
            shown = shown.lstrip("\n")
        pieces = [AnswerPiece("thinking", shown)] if shown or (mark and self._is_new) else []
        self._is_new = self._is_new and not shown
        if mark:
            self._state, self._is_new, self._has_thought = "words", True, True
        return pieces


def _without_end(text: str) -> str:
    """Text without the part at its end that may belong to the closing tag, or be line ends before it."""
    for size in range(min(len(_CLOSING) - 1, len(text)), 0, -1):
        if _CLOSING.startswith(text[-size:]):
            text = text[:-size]
            break
    return text.rstrip("\n")
