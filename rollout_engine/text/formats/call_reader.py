"""The interface between formats and their readers of calls."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from rollout_engine.base.tool_call import BrokenCall, ToolCall
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

    reads_drafts: bool
    """Whether a later </think> that nothing has opened makes drafts of the calls before it."""

    def find(self, full: str, start: int, is_thinking: bool | None, tools: Schemas) -> list[Found]:
        """All calls from `start` on; `is_thinking` as in `parse_tool_calls`."""

    def safe_end(self, full: str, start: int, at: int) -> tuple[int, bool]:
        """How far the text is surely no call, `at` known to be so far: (end, whether a call may begin there).

        (end, False): the rest is too short to decide.
        """

    def may_close(self, new: str) -> bool:
        """Whether new text may have completed a call, which is worth a `find`."""


def first_of(full: str, at: int, wanted: tuple[str, ...]) -> tuple[int, bool]:
    """The first of some texts from `at` on: (its start, True), or (start of a possible beginning, False)."""
    found = _pattern(wanted).search(full, at)
    if found is not None:
        return found.start(), True
    return min(_start_of_partial(full, at, each) for each in wanted), False


@lru_cache(256)
def _pattern(wanted: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, wanted)))


def _start_of_partial(full: str, at: int, wanted: str) -> int:
    """The start of a beginning of `wanted` at the end of `full`, or the end."""
    for length in range(min(len(wanted) - 1, len(full) - at), 0, -1):
        if full.endswith(wanted[:length]):
            return len(full) - length
    return len(full)


def begins_with_calls(full: str, start: int, beginnings: tuple[str, ...]) -> bool | None:
    """Whether the text from `start` on begins with one of these, after spaces; None: it is too short to decide.

    Of forms whose calls have no closing tag: all of such an answer is calls, or nothing is.
    """
    while start < len(full) and (full[start].isspace() or full[start] == MARK):
        start += 1
    rest = full[start:]
    if rest.startswith(beginnings):
        return True
    return None if any(each.startswith(rest) for each in beginnings) else False
