"""Reads the calls of `tool_calls` for formats: their tags count however they are spelled."""

from typing import Any

from rollout_engine.base.tool_call import ToolCall
from rollout_engine.text.formats.call_reader import Found, Schemas, begins_with_calls, first_of
from rollout_engine.text.formats.tool_calls import FRAMED_TAGS, PYTHON_TAG, TextForm, parse_typed_calls
from rollout_engine.text.formats.transcript import MARK

_THINKING = ("<think>", "</think>", "<seed:think>", "</seed:think>")


class TextCalls:
    """Reads the forms of `tool_calls`, whose tags count however they are spelled."""

    reads_drafts = True

    def __init__(self, form: TextForm) -> None:
        self._form: TextForm = form
        self._opening, self._closing = FRAMED_TAGS.get(form, ("", ""))
        self._openings = (self._opening, "<think>", "<seed:think>")
        """A draft in thinking is no call: from the beginning of a block on, text waits for the end."""

    def find(self, full: str, start: int, is_thinking: bool | None, tools: Schemas) -> list[Found]:
        text, places = _without_marks(full[start:])
        if not self._opening and is_thinking is False and text.lstrip().startswith(_THINKING):
            return []  # of bare calls, nothing may stand before the first
        parsed = parse_typed_calls(text, self._form, tools, is_thinking=is_thinking)
        return [
            Found(
                start + places(first),
                start + places(end),
                [each],
                bool(self._closing) and isinstance(each, ToolCall) and written.endswith(self._closing),
            )
            for each, written, (first, end) in zip(parsed.found, parsed.texts, parsed.spans, strict=True)
        ]

    def safe_end(self, full: str, start: int, at: int) -> tuple[int, bool]:
        if self._opening:
            return first_of(full, at, self._openings)
        begins = begins_with_calls(full, start, ("{", PYTHON_TAG))
        if begins is not False:
            return start, bool(begins)
        return first_of(full, at, _THINKING)  # a </think> that nothing has opened: calls may follow it

    def may_close(self, new: str) -> bool:
        return bool(self._closing) and ">" in new


def _without_marks(text: str) -> tuple[str, Any]:
    """(the text as it is decoded, a function from its positions to those of `text`)."""
    if MARK not in text:
        return text, int
    marks = [index for index, character in enumerate(text) if character == MARK]
    shifted = [place - number for number, place in enumerate(marks)]

    def place(at: int) -> int:
        return at + sum(each <= at for each in shifted)

    return text.replace(MARK, ""), place
