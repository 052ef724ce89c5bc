"""Finds stop patterns (`SamplingParams.stop_regex`) as text arrives, in bounded time whatever the patterns.

    text   ... no match can begin here | may still become a match | new
                                       ^ a pattern's start

Each search begins at the pattern's start: the first position of a partial match, one that more text could complete, as
the `regex` package reports it. So it reads little more than the new text, and finds as much as one of the whole
text would. A start is at most `STOP_REGEX_WINDOW` characters back: longer matches are not found.

The package misses some partial matches of patterns that look back from the end of the text (word boundaries,
lookbehinds, the start of a line), and perhaps of a few other constructs. For all of these the start is always the whole
window back.
"""

import time
from typing import NamedTuple

import regex

from rollout_engine.base.sampling_params import STOP_REGEX_SECONDS, STOP_REGEX_WINDOW

_NOT_PARTIAL = regex.compile(
    r"""\\[bBmMGK]                            # boundaries, search anchor, keep
    | \(\? (?: <[=!] | [(&R\d] | P[>&] )       # lookbehinds, conditions, recursion
    | \(\? [a-zA-Z-]* [mrbepw]               # flags: multiline, reverse, kinds of matching
    | (?<! \\[pPNx] ) \{ [^}]* [a-z]         # fuzzy matching""",
    regex.VERBOSE,
)
"""Constructs whose partial matches the package may miss."""
_SECONDS_PER_SEARCH = 0.001
"""Seconds that each search may take on average, in addition to `STOP_REGEX_SECONDS` per sample."""


class StopMatch(NamedTuple):
    """Position of a match in the text, and its pattern."""

    start: int
    end: int
    pattern: str


class StopPatterns:
    """Searches the text of one sample for its stop patterns."""

    def __init__(self, patterns: list[str]) -> None:
        self._patterns = [regex.compile(pattern) for pattern in patterns]  # cached: the request's checks compiled it
        self._is_partial = [_NOT_PARTIAL.search(pattern) is None for pattern in patterns]
        self._starts = [0] * len(patterns)
        self._seconds_left = STOP_REGEX_SECONDS

    @property
    def held_from(self) -> int:
        """Position from which on the text may still become a match."""
        return min(self._starts)

    def search(self, text: str, min_end: int) -> StopMatch | None:
        """Return the match that begins first of those that end at `min_end` or later; ties go to the first pattern.

        `text` grows from call to call. Raises `TimeoutError`, naming the pattern, when all searches of the sample
        together have taken longer than is allowed.
        """
        found = [match for index in range(len(self._patterns)) if (match := self._search(index, text, min_end))]
        return min(found, key=lambda match: match.start, default=None)

    def _search(self, index: int, text: str, min_end: int) -> StopMatch | None:
        pattern, start = self._patterns[index], self._starts[index]
        began, self._seconds_left = time.thread_time(), self._seconds_left + _SECONDS_PER_SEARCH
        timeout = max(self._seconds_left, _SECONDS_PER_SEARCH)
        try:
            match = None
            if self._is_partial[index]:
                first = pattern.search(text, start, partial=True, timeout=timeout)
                start = len(text) if first is None else first.start()
            if start < len(text) and min_end <= len(text):
                matches = pattern.finditer(text, start, overlapped=True, timeout=timeout)
                match = next((each for each in matches if each.end() >= min_end), None)
        except (TimeoutError, MemoryError) as problem:
            self._seconds_left = 0.0
            raise TimeoutError(
                f"stop_regex={pattern.pattern!r} took more than {STOP_REGEX_SECONDS} s of computing to search for: "
                "give a pattern without repeats inside repeats, such as (a+)+."
            ) from problem
        self._seconds_left -= time.thread_time() - began
        self._starts[index] = max(start, len(text) - STOP_REGEX_WINDOW)
        return None if match is None else StopMatch(match.start(), match.end(), pattern.pattern)
