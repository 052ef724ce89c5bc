"""An answer as the text that readers of formats search: tags that are tokens differ from tags that prose spells.

A token that is a tag stands in `full` behind a lone surrogate, which no decoded text contains:

    token ids   <think> is a token, and the policy also spells it
    full        \\ud800<think>I write <think>...            the reader looks for "\\ud800<think>"
    shown       <think>I write <think>...                  as clients get it, or without special tokens
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollout_engine.text.tokenizer import TextCodec

MARK = "\ud800"
"""Stands in front of a tag that is one token."""


Spell = Callable[[str], str]
"""A text with tags -> the same as `Transcript.full` spells it."""


def find_tags(codec: TextCodec, tags: Iterable[str]) -> tuple[Spell, dict[int, str]]:
    """(how texts with these tags are spelled, id -> tag for the tags that are tokens)."""
    ids = {token_id: tag for tag in tags if (token_id := codec.find_added(tag)) is not None}

    def spell(text: str) -> str:
        for tag in ids.values():
            text = text.replace(tag, MARK + tag)
        return text

    return spell, ids


def written_text(codec: TextCodec, tags: Mapping[int, str], token_ids: Sequence[int]) -> str:
    """The text of an answer with its tags, without the special tokens at its end that are no tags."""
    end = len(token_ids)
    while end and token_ids[end - 1] not in tags and codec.special_text(token_ids[end - 1]) is not None:
        end -= 1
    return codec.decode(list(token_ids[:end]))


class Transcript:
    """The text of an answer so far; ids are added as they are sampled."""

    def __init__(
        self,
        codec: TextCodec,
        tags: Mapping[int, str],
        prompt_end: Sequence[int] | str,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """`tags`: token id -> its text, for the tags that are tokens; the rest as in `AnswerFormat.read`."""
        prompt = prompt_end if not isinstance(prompt_end, str) else ()
        self._stream = codec.new_stream(skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt)
        self._codec, self._tags = codec, tags
        self.full = ""
        """All of the text, special tokens included."""
        self.shown = ""
        """The text as the engine decodes it."""
        self._gaps: list[int] = []
        self._hidden: list[int] = [0]
        """Positions in `full` at which hidden characters begin, and how many of them there are up to each."""
        self._ends: list[int] = []

    def push(self, token_ids: Iterable[int]) -> None:
        """Add sampled ids."""
        for token_id in token_ids:
            shown = self._stream.push([token_id])
            tag = self._tags.get(token_id)
            name = tag if tag is not None else self._codec.special_text(token_id)
            if name is None:
                self._add(shown, shown)
                continue
            before, is_shown, after = shown.partition(name)
            self._add(before, before)
            self._add((MARK if tag is not None else "") + name, name if is_shown else "")
            self._add(after, after)

    def finish(self) -> None:
        """Add what is left of an unfinished character."""
        rest = self._stream.flush()
        self._add(rest, rest)

    def place(self, at: int) -> int:
        """The position in `shown` of a position in `full`."""
        index = bisect_left(self._gaps, at)
        if index and at < self._ends[index - 1]:
            return self._gaps[index - 1] - self._hidden[index - 1]
        return at - self._hidden[index]

    def text(self, start: int, end: int) -> str:
        """The shown text of a part of `full`."""
        return self.shown[self.place(start) : self.place(end)]

    def _add(self, full: str, shown: str) -> None:
        if num_hidden := len(full) - len(shown):
            self._gaps.append(len(self.full))
            self._ends.append(len(self.full) + num_hidden)
            self._hidden.append(self._hidden[-1] + num_hidden)
        self.full += full
        self.shown += shown
