"""The words of an answer around its calls: spaces next to a call are left out, and a line break joins the parts."""

from collections.abc import Sequence


def join_words(text: str, start: int, spans: Sequence[tuple[int, int]]) -> str:
    """The text from `start` on without some spans of it."""
    if not spans:
        return text[start:]
    ends = [start, *(end for _, end in spans)]
    starts = [*(first for first, _ in spans), len(text)]
    parts = [text[first:last] for first, last in zip(ends, starts, strict=True)]
    parts = [parts[0].rstrip(), *(part.strip() for part in parts[1:-1]), parts[-1].lstrip()]
    return "\n".join(part for part in parts if part)


class Words:
    """The same as the text arrives: the texts returned are a beginning of the whole, however it continues."""

    def __init__(self, separator: str) -> None:
        self._separator, self._at, self._strips = separator, 0, False
        self._has_begun = False
        """Whether this part has words so far."""
        self._num = 0
        """Characters returned."""

    def begin(self, at: int, *, strips: bool = False) -> None:
        """A part begins at this place of the text. `strips`: without spaces before it."""
        self._at, self._strips, self._has_begun = at, strips, False

    def upto(self, text: str, end: int) -> str:
        """The words up to this place that have not been returned; spaces at their end wait for more words."""
        new = text[self._at : end].rstrip()
        if not new:
            return ""
        self._at += len(new)
        if not self._has_begun:
            new = new.lstrip() if self._strips else new
            new = self._separator + new if self._num else new
            self._has_begun = True
        self._num += len(new)
        return new

    def rest(self, whole: str) -> str:
        """The part of the whole that has not been returned."""
        rest, self._num = whole[self._num :], len(whole)
        return rest
