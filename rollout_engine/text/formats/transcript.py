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
    while end and token_ids[end - 1] not in tags and token_ids[end - 1] in codec.special_texts:
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
        self._new: list[tuple[str, str]] = []
        """Parts of both that are not joined yet."""
        self._length = 0
        """Characters of `full`, the new ones included."""
        self._gaps: list[int] = []
        self._hidden: list[int] = [0]
        """Positions in `full` at which hidden characters begin, and how many of them there are up to each."""
        self._ends: list[int] = []

    def push(self, token_ids: Iterable[int]) -> None:
        """Add sampled ids."""
        special, run = self._codec.special_texts, list[int]()
        for token_id in token_ids:
            if token_id not in self._tags and token_id not in special:
                run.append(token_id)
                continue
            self._add_run(run)
            run = []
            is_tag, shown = token_id in self._tags, self._stream.push([token_id])
            name = self._tags[token_id] if is_tag else special[token_id]
            before, is_shown, after = shown.partition(name)
            self._add(before, before)
            self._add((MARK if is_tag else "") + name, name if is_shown else "")
            self._add(after, after)
        self._add_run(run)
        self._join()

    def finish(self) -> None:
        """Add the rest of an unfinished character."""
        rest = self._stream.flush()
        self._add(rest, rest)
        self._join()

    def place(self, at: int) -> int:
        """The position in `shown` of a position in `full`."""
        index = bisect_left(self._gaps, at)
        if index and at < self._ends[index - 1]:
            return self._gaps[index - 1] - self._hidden[index - 1]
        return at - self._hidden[index]

    def text(self, start: int, end: int) -> str:
        """The shown text of a part of `full`."""
        return self.shown[self.place(start) : self.place(end)]

    def _add_run(self, token_ids: list[int]) -> None:
        if token_ids:
            shown = self._stream.push(token_ids)
            self._add(shown, shown)

    def _add(self, full: str, shown: str) -> None:
        if num_hidden := len(full) - len(shown):
            self._gaps.append(self._length)
            self._ends.append(self._length + num_hidden)
            self._hidden.append(self._hidden[-1] + num_hidden)
        self._length += len(full)
        self._new.append((full, shown))

    def _join(self) -> None:
        """Add the new parts to both texts."""
        self.full += "".join(full for full, _ in self._new)
        self.shown += "".join(shown for _, shown in self._new)
        self._new = []
