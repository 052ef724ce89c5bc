"""The parts of an answer, whole or as they are streamed."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from envs_adapters.base import BrokenCall, ToolCall


class AnswerParts(msgspec.Struct):
    """An answer, divided."""

    thinking: str | None
    """None: there was none; "": an empty block of it."""
    text: str
    """The words outside thinking and calls."""
    calls: list[ToolCall]
    broken: list[BrokenCall] = []
    """Parts that were meant as calls and are none; they are part of the text."""


class AnswerPiece(msgspec.Struct, frozen=True):
    """The next piece of an answer that is streamed."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    """Of thinking and of words."""
    call: ToolCall | None = None


def join_pieces(pieces: Iterable[AnswerPiece]) -> AnswerParts:
    """The answer that was streamed in these pieces."""
    joined = AnswerParts(None, "", [])
    for piece in pieces:
        if piece.kind == "thinking":
            joined.thinking = (joined.thinking or "") + piece.text
        elif piece.kind == "text":
            joined.text += piece.text
        elif piece.call is not None:
            joined.calls.append(piece.call)
    return joined
