"""What formats ask of a reader of calls, and the reader of the forms that are found in text alone."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.tool_calls import FRAMED_TAGS, ToolFormat, parse_typed_calls
from rollout_engine.text.formats.transcript import MARK

Schemas = Iterable[Mapping[str, Any]]


class Found(NamedTuple):
    """A part of an answer that is meant as one call or several."""

    start: int
    end: int
    """Both ends include the tags."""
    calls: list[ToolCall | BrokenCall]
    is_closed: bool
    """Whether no further token can change it."""

    @property
    def is_call(self) -> bool:
        """Whether all of it could be read, so that it is no text."""
        return all(isinstance(each, ToolCall) for each in self.calls)


class CallReader(Protocol):
    """Finds the calls in the text of a `Transcript` behind the thinking."""

    def find(self, full: str, start: int, is_thinking: bool | None, tools: Schemas) -> list[Found]:
        """All calls from `start` on; `is_thinking` as in `parse_tool_calls`."""

    def safe_end(self, full: str, start: int, at: int) -> tuple[int, bool]:
        """How far the text is surely no call, `at` known to be so far: (end, whether a call may begin there).

        (end, False): what follows is too short to say.
        """

    def may_close(self, new: str) -> bool:
        """Whether new text may have completed a call, which is worth a `find`."""


class TextCalls:
    """Reads the forms of `tool_calls`, whose tags count however they are spelled."""

    def __init__(self, form: ToolFormat) -> None:
        self._form: ToolFormat = form
        self._opening, self._closing = FRAMED_TAGS.get(form, ("", ""))
        self._openings = (self._opening, "<think>", "<seed:think>")
        """A draft in thinking is no call: from the beginning of a block on, text waits for the end."""

    def find(self, full: str, start: int, is_thinking: bool | None, tools: Schemas) -> list[Found]:
        text, places = _without_marks(full[start:])
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
        return _safe_end_of_bare(full, start, at, "{", ("<|python_tag|>",))

    def may_close(self, new: str) -> bool:
        return bool(self._closing) and ">" in new


def first_of(full: str, at: int, openings: Iterable[str]) -> tuple[int, bool]:
    """The first of some texts from `at` on: (its start, True), or (start of what may begin one, False)."""
    wanted = [each for each in openings if each]
    places = [place for each in wanted if (place := full.find(each, at)) >= 0]
    if places:
        return min(places), True
    return min([len(full), *(_start_of_partial(full, at, each) for each in wanted)]), False


def _start_of_partial(full: str, at: int, wanted: str) -> int:
    """The place at the end of `full` where a beginning of `wanted` stands, or the end."""
    for length in range(min(len(wanted) - 1, len(full) - at), 0, -1):
        if full.endswith(wanted[:length]):
            return len(full) - length
    return len(full)


def _safe_end_of_bare(full: str, start: int, at: int, brace: str, tags: tuple[str, ...]) -> tuple[int, bool]:
    """`safe_end` of forms whose calls have no closing tag: an answer is calls from its first character on, or has none.

    A </think> that nothing has opened makes drafts of what came before: calls may follow it.
    """
    begin = start
    while begin < len(full) and (full[begin].isspace() or full[begin] == MARK):
        begin += 1
    rest = full[begin:]
    if not rest or any(tag.startswith(rest) for tag in tags):
        return start, False
    if rest.startswith((brace, *tags)):
        return start, True
    return first_of(full, max(at, start), ("</think>", "</seed:think>", "<think>", "<seed:think>"))


def _without_marks(text: str) -> tuple[str, Any]:
    """(the text as it is decoded, a function from its positions to those of `text`)."""
    if MARK not in text:
        return text, int
    marks = [index for index, character in enumerate(text) if character == MARK]
    shifted = [place - number for number, place in enumerate(marks)]

    def place(at: int) -> int:
        return at + sum(each <= at for each in shifted)

    return text.replace(MARK, ""), place
