"""Answers in messages with channels, as gpt-oss writes them ("harmony").

    prompt   ...<|start|>assistant
    answer   <|channel|>analysis<|message|>thinking<|end|>
             <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
        or   <|start|>assistant<|channel|>final<|message|>words<|return|>

A message with a recipient is a call, whichever channel it is in; `analysis` is thinking, everything else is words. A
recipient is read before or behind the channel.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.answer import AnswerParts, AnswerPiece
from rollout_engine.text.formats.call_reader import Schemas, first_of
from rollout_engine.text.formats.json_calls import MAX_CALL_CHARACTERS, MAX_CALLS, MAX_PROBLEM_CHARACTERS
from rollout_engine.text.formats.tool_arguments import parse_json
from rollout_engine.text.formats.transcript import MARK, Transcript, find_tags, written_text
from rollout_engine.text.formats.words import Words
from rollout_engine.text.tokenizer import TextCodec

TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_HEADER = 256
"""Tokens at the end of a prompt in which its last header is looked for."""
_RECIPIENT = re.compile(rf"(?:^|\s)to=([^\s<{MARK}]+)")


class _Message(NamedTuple):
    """One message of an answer; places in `Transcript.full`."""

    kind: Literal["thinking", "text", "call"]
    recipient: str
    """Name of the tool, of a call."""
    start: int
    end: int
    """The body, without tags."""
    next: int
    """Start of the next header."""
    is_closed: bool


class HarmonyFormat:
    """Reads messages with channels; see `AnswerFormat`."""

    name = "harmony"

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._spell, self._ids = find_tags(codec, TAGS)
        self._start, self._channel, self._message, self._constrain, *ends = map(self._spell, TAGS)
        self._ends = tuple(ends)
        self._channel_name = re.compile(rf"{re.escape(self._channel)}\s*(\w*)")

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
        stream = self.stream(prompt_end=prompt_end, tools=tools, skip_special_tokens=skip_special_tokens)
        stream.feed(token_ids, text)
        stream.end()
        return stream.parts

    def stream(
        self,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Schemas | None = None,
        skip_special_tokens: bool = True,
    ) -> "HarmonyStream":
        """Begin to read an answer as it is sampled."""
        transcript = Transcript(self._codec, self._ids, prompt_end, skip_special_tokens=skip_special_tokens)
        return HarmonyStream(self, transcript, self._header_of(prompt_end), finds_calls=tools is not None)

    def write(self, thinking: str | None, text: str) -> str | None:
        """Write thinking and words as the family does."""
        thought = "" if thinking is None else f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant"
        return f"{thought}<|channel|>final<|message|>{text}" if text else thought

    def write_calls(self, calls: Sequence[ToolCall]) -> str | None:
        """Write calls as the family does: the recipient stands behind the channel."""
        head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
        written = [head.format(call.name, json.dumps(call.arguments)) for call in calls]
        return "<|start|>assistant".join(written)

    def spell_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer with its tags, without its end token."""
        return written_text(self._codec, self._ids, token_ids)

    def has_tags(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of these tokens is a tag."""
        return any(token_id in self._ids for token_id in token_ids)

    def new_call_id(self, name: str, index: int) -> str:
        """Make an id for a call, in the form that the template takes."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def next_message(self, full: str, at: int, header: str, seen: int) -> _Message | None:
        """The message whose header continues at `at`, behind `header` of the prompt; None if its header is unfinished.

        `seen`: no end of its body stands before this place.
        """
        if not header.endswith(self._message):
            begins, is_there = first_of(full, at, (self._message, self._start, *self._ends))
            while is_there and not full.startswith(self._message, begins):  # a header without a message
                header, at = "", begins + len(self._tag_at(full, begins))
                begins, is_there = first_of(full, at, (self._message, self._start, *self._ends))
            if not is_there:
                return None
            header, at = header + full[at:begins], begins + len(self._message)
        end, is_closed = first_of(full, max(at, seen), (*self._ends, self._start, self._channel))
        next_ = end
        if is_closed and not full.startswith(self._channel, end):
            next_ = end + len(self._tag_at(full, end))
        recipient = _RECIPIENT.search(header.replace(self._channel, " ").replace(self._constrain, " "))
        channel = self._channel_name.search(header)
        if recipient is not None and recipient[1] != "assistant":
            return _Message("call", recipient[1].removeprefix("functions."), at, end, next_, is_closed)
        kind: Literal["thinking", "text"] = "thinking" if channel and channel[1] == "analysis" else "text"
        return _Message(kind, "", at, end, next_, is_closed)

    def is_plain(self, full: str) -> bool:
        """Whether an answer has none of the tags: all of it is words."""
        return not any(tag in full for tag in (self._start, self._channel, self._message))

    def _tag_at(self, full: str, at: int) -> str:
        return next(tag for tag in (self._start, *self._ends) if full.startswith(tag, at))

    def _header_of(self, prompt_end: Sequence[int] | str) -> str:
        """The part of a header that the prompt has written: behind its last <|start|>."""
        if isinstance(prompt_end, str):
            text = self._spell(prompt_end)
        else:
            transcript = Transcript(self._codec, self._ids, "", skip_special_tokens=False)
            transcript.push(prompt_end[-_HEADER:])
            text = transcript.full
        _, begins, header = text.rpartition(self._start)
        if not begins or any(end in header for end in self._ends):
            return ""
        opening, found, body = header.partition(self._message)
        return header if not body.strip() or not found else opening + self._message


class HarmonyStream:
    """Reads one answer of a `HarmonyFormat` as it is sampled."""

    def __init__(self, form: HarmonyFormat, transcript: Transcript, header: str, *, finds_calls: bool) -> None:
        self._form, self._transcript, self._header, self._finds_calls = form, transcript, header, finds_calls
        self._at = 0
        """Start of the message that is being read: its header, or its body behind a header of the prompt."""
        self._limit = 0
        """Characters of the shown text that the engine has released."""
        self._words = {"thinking": Words("\n"), "text": Words("\n")}
        self._begun: int | None = None
        """Start of the body that is being returned."""
        self._seen = 0
        """End of the part of it that has been searched for its end."""
        self._parts = AnswerParts()

    @property
    def parts(self) -> AnswerParts:
        """All parts of the answer, after `end`."""
        return self._parts

    def feed(self, token_ids: Sequence[int], text: str) -> list[AnswerPiece]:
        """Take the next tokens, and the text released since."""
        self._transcript.push(token_ids)
        self._limit += len(text)
        return list(self._advance(has_ended=False))

    def end(self) -> list[AnswerPiece]:
        """Return the pieces that are left, once the answer has ended."""
        self._transcript.finish()
        pieces = list(self._advance(has_ended=True))
        return [AnswerPiece("thinking"), *pieces] if self._parts.thinking == "" else pieces

    def _advance(self, *, has_ended: bool) -> Iterator[AnswerPiece]:
        full, place = self._transcript.full, self._transcript.place
        while (message := self._form.next_message(full, self._at, self._header, self._seen)) is not None:
            self._seen = message.end
            is_over = has_ended or (message.is_closed and place(message.end) <= self._limit)
            if message.kind != "call" or not self._finds_calls:
                kind: Literal["thinking", "text"] = "thinking" if message.kind == "thinking" else "text"
                yield from self._speak(kind, message)
            elif is_over:
                yield from self._call(message)
            if not is_over:
                return
            self._header, self._begun, self._seen = "", None, 0
            self._parts.is_thinking = message.kind == "thinking" and not message.is_closed
            self._at = message.next
            if not message.is_closed:
                return
        if has_ended and self._form.is_plain(full) and self._at == 0:
            yield from self._speak("text", _Message("text", "", 0, len(full), len(full), is_closed=False))

    def _speak(self, kind: Literal["thinking", "text"], message: _Message) -> Iterator[AnswerPiece]:
        """Return the new part of a body."""
        place, words = self._transcript.place, self._words[kind]
        if self._begun != message.start:
            self._begun = message.start
            words.begin(place(message.start), strips=True)
            if kind == "thinking" and self._parts.thinking is None:
                self._parts.thinking = ""
        text = words.upto(self._transcript.shown, min(place(message.end), self._limit))
        if not text:
            return
        if kind == "thinking":
            self._parts.thinking = (self._parts.thinking or "") + text
        else:
            self._parts.text += text
        yield AnswerPiece(kind, text)

    def _call(self, message: _Message) -> Iterator[AnswerPiece]:
        body = self._transcript.full[message.start : message.end].replace(MARK, "").strip()
        found = _read_call(message.recipient, body, len(self._parts.found))
        if len(self._parts.found) <= MAX_CALLS:
            self._parts.found.append(found)
        if isinstance(found, ToolCall):
            yield AnswerPiece("call", call=found)
        else:
            yield from self._speak("text", message)


def _read_call(name: str, body: str, number: int) -> ToolCall | BrokenCall:
    problem = ""
    if number >= MAX_CALLS:
        problem = f"more than {MAX_CALLS} calls in one answer"
    elif len(body) > MAX_CALL_CHARACTERS:
        problem = f"{len(body)} characters, more than {MAX_CALL_CHARACTERS}"
    else:
        try:
            arguments = parse_json(body) if body else {}
            if isinstance(arguments, dict):
                return ToolCall(name, arguments)
            problem = f"its arguments are a {type(arguments).__name__}, not an object"
        except (ValueError, RecursionError) as reason:
            problem = f"not JSON: {reason}"
    return BrokenCall(body[:MAX_PROBLEM_CHARACTERS], problem)
