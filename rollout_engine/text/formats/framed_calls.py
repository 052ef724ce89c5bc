"""Finds calls between tags that a family has tokens for: all text between two such tokens is meant as a call.

A tokenizer that has no token for a tag leaves only its text to look for. Then a tag that is not followed by a call and
has no closing tag is prose.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.call_reader import Found, Schemas, first_of
from rollout_engine.text.formats.json_calls import (
    MAX_CALL_CHARACTERS,
    MAX_CALLS,
    MAX_PROBLEM_CHARACTERS,
    Unreadable,
    after_space,
)
from rollout_engine.text.formats.tool_arguments import typed_arguments
from rollout_engine.text.formats.transcript import MARK

ReadCalls: TypeAlias = Callable[[str, int], tuple[list[ToolCall], int]]
"""(text, place behind the opening tag) -> (the calls, their end). Raises `Unreadable`, `ValueError` or
`RecursionError`."""


class Frame(NamedTuple):
    """Tags, as `Transcript.full` spells them, and a reader of the text between them."""

    opening: str
    closing: str
    """"": calls end with their own grammar."""
    read: ReadCalls


class FramedCalls:
    """Reads one family.

    Args:
        frames: the ways to write a call.
        around: tags before the first call and behind the last one.
        is_typed: whether values are written as text, whose types the tools' schemas give.
    """

    reads_drafts = False

    def __init__(self, frames: Sequence[Frame], around: Sequence[str] = (), *, is_typed: bool = False) -> None:
        self._frames, self._around, self._is_typed = frames, around, is_typed
        self._openings = tuple(frame.opening for frame in frames)
        self._tags: tuple[str, ...] = (*self._openings, *around)

    def find(self, full: str, start: int, is_thinking: bool | None, tools: Schemas) -> list[Found]:
        """Find all calls from `start` on; thinking has been removed before."""
        found: list[Found] = []
        num, at = 0, start
        parameters = _parameters(tools) if self._is_typed else {}
        while num <= MAX_CALLS:
            at, is_there = first_of(full, at, self._tags)
            if not is_there:
                break
            frame = next((each for each in self._frames if full.startswith(each.opening, at)), None)
            part = self._tag_at(full, at, found) if frame is None else self._part_at(full, at, frame)
            if part is None:
                at += 1
                continue
            if num + len(part.calls) > MAX_CALLS:
                problem = f"more than {MAX_CALLS} calls in one answer"
                part = part._replace(calls=[_make_broken(full[part.start : part.end], problem)], is_closed=False)
            found.append(part._replace(calls=[_with_types(each, parameters) for each in part.calls]))
            num, at = num + len(part.calls), part.end
        return found

    def safe_end(self, full: str, start: int, at: int) -> tuple[int, bool]:
        """Return how far the text is surely no call."""
        return first_of(full, at, self._tags)

    def may_close(self, new: str) -> bool:
        """Return whether new text may have completed a call."""
        return any(each in new for each in "}]>") or MARK in new

    def _part_at(self, full: str, start: int, frame: Frame) -> Found | None:
        """The calls whose opening tag stands at `start`, or a broken one; None if the tag is prose."""
        inner = start + len(frame.opening)
        try:
            calls, end = frame.read(full, inner)
            if end - inner > MAX_CALL_CHARACTERS:
                raise Unreadable(f"{end - inner} characters, more than {MAX_CALL_CHARACTERS}")
            stop = after_space(full, end)
            if not frame.closing:
                return Found(start, end, list(calls), is_closed=True)
            if full.startswith(frame.closing, stop):
                return Found(start, stop + len(frame.closing), list(calls), is_closed=True)
            if stop == len(full) or full.startswith(self._tags, stop):
                return Found(start, end, list(calls), is_closed=False)
            problem = f"something other than {frame.closing.replace(MARK, '')} follows it"
        except (Unreadable, ValueError, RecursionError) as reason:
            problem = str(reason) if isinstance(reason, Unreadable) else f"not JSON: {reason}"
        tags = (*self._tags, frame.closing) if frame.closing else self._tags
        stop, is_tag = first_of(full, inner, tags)
        stop = stop if is_tag else len(full)
        if is_tag and frame.closing and full.startswith(frame.closing, stop):
            return Found(start, stop + len(frame.closing), [_make_broken(full[inner:stop], problem)], is_closed=False)
        if MARK not in frame.opening:
            return None
        return Found(start, stop, [_make_broken(full[inner:stop], problem)], is_closed=False)

    def _tag_at(self, full: str, at: int, found: Sequence[Found]) -> Found | None:
        """A tag around the calls, which is no word; None if it is prose: text, and not next to a call."""
        tag = next(each for each in self._around if full.startswith(each, at))
        end = at + len(tag)
        follows = bool(found) and after_space(full, found[-1].end) == at
        precedes = full.startswith(self._openings, after_space(full, end))
        return Found(at, end, [], is_closed=True) if MARK in tag or follows or precedes else None


def _make_broken(text: str, problem: str) -> BrokenCall:
    return BrokenCall(text.replace(MARK, "")[:MAX_PROBLEM_CHARACTERS], problem)


def _parameters(tools: Schemas) -> dict[str, object]:
    inner = [schema.get("function", schema) for schema in tools]
    return {each["name"]: each.get("parameters") or {} for each in inner}


def _with_types(call: ToolCall | BrokenCall, parameters: dict[str, object]) -> ToolCall | BrokenCall:
    if isinstance(call, BrokenCall) or not parameters:
        return call
    return ToolCall(call.name, typed_arguments(call.arguments, parameters.get(call.name, {})))
