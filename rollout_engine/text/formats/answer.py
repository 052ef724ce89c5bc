"""The parts of an answer: thinking, words and calls of tools, whole or as they are sampled.

    format = answer_format(codec, chat_template)                    choose.py; None: the template teaches neither
    parts = format.read(token_ids, text, prompt_end=prompt_ids, tools=schemas)
    stream = format.stream(prompt_end=prompt_ids, tools=schemas)
    for ids, text in deltas: pieces = stream.feed(ids, text)
    pieces = stream.end()

The pieces of a stream, joined, are the parts that `read` returns for the whole, however the answer was divided. A piece
is final: no text is returned that turns out to be thinking or a call.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from rollout_engine.base.tool_call import BrokenCall, ToolCall


class AnswerParts(msgspec.Struct):
    """Thinking, words and calls of one answer."""

    thinking: str | None = None
    """Without its tags and the spaces at both ends; "": an empty block; None: there was none."""
    text: str = ""
    """The words outside of thinking and calls. A part that was meant as a call and is none stays there."""
    found: list[ToolCall | BrokenCall] = []
    """The calls and the parts that were meant as calls, in their order."""
    is_thinking: bool = False
    """Whether the answer ended inside its thinking."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that could be read."""
        return [each for each in self.found if isinstance(each, ToolCall)]

    @property
    def broken(self) -> list[BrokenCall]:
        """The parts that were meant as calls and are none."""
        return [each for each in self.found if isinstance(each, BrokenCall)]


class AnswerPiece(msgspec.Struct, frozen=True):
    """The next piece of an answer that is being sampled."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    """More thinking or more words. A piece of thinking may be empty: the block is there, and may stay empty."""
    call: ToolCall | None = None
    """The call, of a piece of that kind; None for others."""


class AnswerStream(Protocol):
    """Reads one answer as it is sampled."""

    def feed(self, token_ids: Sequence[int], text: str) -> list[AnswerPiece]:
        """Take the next tokens, and the text that the engine has released since: it may lag behind."""

    def end(self) -> list[AnswerPiece]:
        """Return the rest, once the answer has ended."""

    @property
    def parts(self) -> AnswerParts:
        """All parts, after `end`: the pieces joined, with broken calls."""


class AnswerFormat(Protocol):
    """How the answers of a model family are read."""

    name: str

    def read(
        self,
        token_ids: Sequence[int],
        text: str,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Iterable[Mapping[str, Any]] | None = None,
        skip_special_tokens: bool = True,
    ) -> AnswerParts:
        """Read a whole answer. Never raises for the text that a policy wrote.

        Args:
            token_ids: as sampled, end token included.
            text: as the engine decoded them; a stop string may have cut it.
            prompt_end: the ids of the prompt or its last 32 at least, or its text: it may have opened the thinking.
            tools: JSON schemas, which give types to arguments that are written as text. None: calls are not looked
                for and stay text.
            skip_special_tokens: whether `text` was decoded without special tokens.
        """

    def stream(
        self,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Iterable[Mapping[str, Any]] | None = None,
        skip_special_tokens: bool = True,
    ) -> AnswerStream:
        """Begin to read an answer as it is sampled; arguments as in `read`."""

    def write(self, thinking: str | None, text: str) -> str | None:
        """An answer with thinking, then words, as the family writes it; None if it has no thinking."""

    def write_calls(self, calls: Sequence[ToolCall]) -> str | None:
        """An answer that is these calls, if models write them otherwise than chat templates do; None: they do not."""

    def spell_answer(self, token_ids: Sequence[int]) -> str:
        """The text of an answer with its tags, without the token that ended it."""

    def has_tags(self, token_ids: Sequence[int]) -> bool:
        """Whether any of these tokens is a tag."""

    def new_call_id(self, name: str, index: int) -> str:
        """An id for the call of a tool, the conversation's number `index`, as the family's template takes them."""
