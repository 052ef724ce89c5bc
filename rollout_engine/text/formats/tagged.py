"""Answers that begin with thinking between two tags, and calls among the words behind it: nearly all families."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rollout_engine.base.tool_call import ToolCall
from rollout_engine.text.formats.answer import AnswerParts, AnswerPiece
from rollout_engine.text.formats.call_reader import CallReader, Found, Schemas, first_of
from rollout_engine.text.formats.json_calls import MAX_CALLS
from rollout_engine.text.formats.tool_calls import PROMPT_END, opens_thinking
from rollout_engine.text.formats.transcript import Spell, Transcript, find_tags, written_text
from rollout_engine.text.formats.words import Words, join_words
from rollout_engine.text.tokenizer import TextCodec


class Tags(NamedTuple):
    """The tags around thinking."""

    opening: str
    closing: str
    tokens: tuple[str, ...]
    """The parts of both that may be tokens."""


class TaggedFormat:
    """Reads thinking between tags, then words and calls.

    Args:
        name: of the family.
        thinking: the tags around thinking; None: the format has none, and thinking stays text.
        make_calls: makes the reader that finds calls; None: they stay text.
        tags: further tags that count only as tokens of their own, if the tokenizer has such.
        call_id: makes ids of calls from (name, number) if templates ask for a form of their own.
    """

    def __init__(
        self,
        codec: TextCodec,
        name: str,
        thinking: Tags | None,
        make_calls: Callable[[Spell], CallReader] | None,
        *,
        tags: Iterable[str] = (),
        call_id: Callable[[str, int], str] | None = None,
    ) -> None:
        self.name, self._codec, self._call_id = name, codec, call_id
        spell, self._ids = find_tags(codec, [*(thinking.tokens if thinking else ()), *tags])
        self._plain = thinking
        self.calls = None if make_calls is None else make_calls(spell)
        self.thinking = thinking
        if thinking is not None:
            self.thinking = thinking._replace(opening=spell(thinking.opening), closing=spell(thinking.closing))
        """The tags as `Transcript.full` spells them."""

    def read(
        self,
        token_ids: Sequence[int],
        text: str,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Schemas | None = None,
        skip_special_tokens: bool = True,
    ) -> AnswerParts:
        """Read a whole answer; arguments as in `AnswerFormat`."""
        transcript = Transcript(self._codec, self._ids, prompt_end, skip_special_tokens=skip_special_tokens)
        transcript.push(token_ids)
        transcript.finish()
        return self.divide(transcript, self.is_opened(prompt_end), tools, len(text))

    def stream(
        self,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Schemas | None = None,
        skip_special_tokens: bool = True,
    ) -> "TaggedStream":
        """Begin to read an answer as it is sampled."""
        transcript = Transcript(self._codec, self._ids, prompt_end, skip_special_tokens=skip_special_tokens)
        return TaggedStream(self, transcript, self.is_opened(prompt_end), tools)

    def write(self, thinking: str | None, text: str) -> str | None:
        """Write thinking and words as the family does."""
        if thinking is None:
            return text
        if self._plain is None:
            return None
        return f"{self._plain.opening}\n{thinking}\n{self._plain.closing}\n\n{text}"

    def write_calls(self, calls: Sequence[ToolCall]) -> str | None:
        """Write calls as the family does."""
        return None

    def spell_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer with its tags, without its end token."""
        return written_text(self._codec, self._ids, token_ids)

    def has_tags(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of these tokens is a tag."""
        return any(token_id in self._ids for token_id in token_ids)

    def new_call_id(self, name: str, index: int) -> str:
        """Make an id for a call, in the form that the template takes."""
        return self._call_id(name, index) if self._call_id else f"call_{uuid.uuid4().hex[:24]}"

    def is_opened(self, prompt_end: Sequence[int] | str) -> bool | None:
        """Whether the prompt has opened the thinking: True, or None if it leaves that open."""
        if self._plain is None or self.thinking is None:
            text = prompt_end if isinstance(prompt_end, str) else self._codec.decode(list(prompt_end[-PROMPT_END:]))
            return opens_thinking(text)
        if isinstance(prompt_end, str):
            text, (opening, closing, _) = prompt_end, self._plain
        else:
            transcript = Transcript(self._codec, self._ids, "", skip_special_tokens=False)
            transcript.push(prompt_end[-PROMPT_END:])
            text, (opening, closing, _) = transcript.full, self.thinking
        start = text.rfind(opening)
        is_open = start >= 0 and closing not in text[start:] and not text[start + len(opening) :].strip()
        return True if is_open else None

    def thinking_span(self, full: str, is_opened: bool | None) -> tuple[int, int, int, bool] | None:
        """(start and end of the thinking, start of the words, whether it is closed); None without thinking."""
        if self.thinking is None:
            return None
        start, begin = 0, after_space(full, 0)
        if full.startswith(self.thinking.opening, begin):  # also behind a prompt that has it: some models repeat it
            start = begin + len(self.thinking.opening)
        elif not is_opened:
            return None
        end = full.find(self.thinking.closing, start)
        if end < 0:
            return start, len(full), len(full), False
        return start, end, after_space(full, end + len(self.thinking.closing)), True

    def divide(self, transcript: Transcript, is_opened: bool | None, tools: Schemas | None, limit: int) -> AnswerParts:
        """The parts of a whole answer, of whose shown text the first `limit` characters were released."""
        full, shown = transcript.full, transcript.shown[:limit]
        span = self.thinking_span(full, is_opened)
        parts, start = AnswerParts(), 0
        if span is not None:
            first, last, start, is_closed = span
            parts.thinking = shown[transcript.place(first) : transcript.place(last)].strip()
            parts.is_thinking = not is_closed
        found: list[Found] = []
        if self.calls is not None and tools is not None and not parts.is_thinking:
            found = self.calls.find(full, start, False if span is not None else is_opened, tools)
            parts.found = [each for part in found for each in part.calls]
        spans = [(transcript.place(part.start), transcript.place(part.end)) for part in found if part.is_call]
        parts.text = join_words(shown, transcript.place(start), spans)
        return parts


class TaggedStream:
    """Reads one answer of a `TaggedFormat` as it is sampled.

        start ── <think> ──> thinking ── </think> ──> words ── <tool_call> ──> held ── </tool_call> ──> words
          └────────────────── anything else ────────────^

    Text that may begin a tag is held. From a tag of calls on, all is held until the call is complete; `end` returns the
    difference between the parts of the whole answer and the pieces so far.
    """

    def __init__(
        self, form: TaggedFormat, transcript: Transcript, is_opened: bool | None, tools: Schemas | None
    ) -> None:
        self._form, self._transcript, self._is_opened = form, transcript, is_opened
        self._tools = None if tools is None else list(tools)
        self._calls = form.calls if tools is not None else None
        self._limit = 0
        """Characters of the shown text that the engine has released."""
        self._state = "start"
        self._at = self._start = 0
        """End of the part of `full` that has been read in this state, and start of the state."""
        self._is_known = form.calls is not None and not form.calls.reads_drafts
        """Whether the thinking is known to be over, so that calls are no drafts."""
        self._thinking, self._words = Words(separator=""), Words(separator="\n")
        self._num_thinking = self._num_calls = 0
        self._parts = AnswerParts()

    @property
    def parts(self) -> AnswerParts:
        """All parts of the answer, after `end`."""
        return self._parts

    def feed(self, token_ids: Sequence[int], text: str) -> list[AnswerPiece]:
        """Take the next tokens, and the text released since."""
        before = len(self._transcript.full)
        self._transcript.push(token_ids)
        self._limit += len(text)
        pieces: list[AnswerPiece] = []
        if self._state == "start":
            self._begin()
        if self._state == "thinking":
            self._think(pieces)
        if self._state == "words":
            self._speak(pieces)
        elif self._state == "held" and self._calls is not None:
            if self._calls.may_close(self._transcript.full[before:]):
                self._close_calls(pieces)
        return pieces

    def end(self) -> list[AnswerPiece]:
        """Return the pieces that are left, once the answer has ended."""
        self._transcript.finish()
        self._parts = parts = self._form.divide(self._transcript, self._is_opened, self._tools, self._limit)
        pieces = []
        if parts.thinking is not None and (rest := self._thinking.rest(parts.thinking) or not self._num_thinking):
            pieces.append(AnswerPiece("thinking", rest if isinstance(rest, str) else ""))
        if rest := self._words.rest(parts.text):
            pieces.append(AnswerPiece("text", rest))
        pieces += [AnswerPiece("call", call=call) for call in parts.calls[self._num_calls :]]
        return pieces

    def _begin(self) -> None:
        tags, full = self._form.thinking, self._transcript.full
        begin = after_space(full, 0)
        if tags is None:
            self._enter("words", 0)
        elif full.startswith(tags.opening, begin):
            self._enter("thinking", begin + len(tags.opening))
        elif not tags.opening.startswith(full[begin:]):
            self._enter("thinking" if self._is_opened else "words", 0)

    def _enter(self, state: str, at: int) -> None:
        self._state, self._at, self._start = state, at, at
        if state == "words":
            self._words.begin(self._transcript.place(at))
        elif state == "thinking":
            self._thinking.begin(self._transcript.place(at), strips=True)

    def _think(self, pieces: list[AnswerPiece]) -> None:
        assert self._form.thinking is not None
        closing, full = self._form.thinking.closing, self._transcript.full
        end, is_closed = first_of(full, self._at, (closing,))
        if text := self._thinking.upto(*self._release(end)):
            pieces.append(AnswerPiece("thinking", text))
            self._num_thinking += 1
        self._at = end
        if is_closed and self._is_released(end):
            self._is_known = True
            self._enter("words", end + len(closing))
            self._words.begin(self._transcript.place(self._at), strips=True)

    def _speak(self, pieces: list[AnswerPiece]) -> None:
        full = self._transcript.full
        if self._calls is None:
            end, may_begin = len(full), False
        else:
            end, may_begin = self._calls.safe_end(full, self._start, self._at)
        if text := self._words.upto(*self._release(end)):
            pieces.append(AnswerPiece("text", text))
        self._at = end
        if may_begin and self._is_released(end):
            self._state = "held"
            self._close_calls(pieces)

    def _close_calls(self, pieces: list[AnswerPiece]) -> None:
        """Return the calls that are complete, and go back to the words if all are."""
        full, calls = self._transcript.full, self._calls
        assert calls is not None and self._tools is not None
        if not self._is_known or self._num_calls >= MAX_CALLS:
            return
        for found in calls.find(full, self._at, False, self._tools):
            if not (found.start == self._at and found.is_closed and found.is_call):
                return
            if self._num_calls + len(found.calls) > MAX_CALLS:
                return
            pieces += [AnswerPiece("call", call=each) for each in found.calls if isinstance(each, ToolCall)]
            self._num_calls += len(found.calls)
            self._enter("words", found.end)
            self._words.begin(self._transcript.place(found.end), strips=True)
            break
        else:
            return
        self._speak(pieces)

    def _is_released(self, end: int) -> bool:
        """Whether the engine has released all text before a place: nothing before it is still to be returned."""
        return self._transcript.place(end) <= self._limit

    def _release(self, end: int) -> tuple[str, int]:
        """(the shown text, the place in it up to which it may be returned)."""
        return self._transcript.shown, min(self._transcript.place(end), self._limit)


def after_space(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
