"""Finds stop patterns (`SamplingParams.stop_regex`) as text arrives, in bounded time whatever the patterns.

    text   ... no match can begin here | may still become a match | new
                                       ^ a pattern's start

Each search begins at the pattern's start: the first place where more text could still bring a match about, which the
`regex` package tells (a partial match). So a search reads little but new text, and finds what a search of the whole
text would. A start never lies more than `STOP_REGEX_WINDOW` characters back: longer matches are not found.

Of patterns that look back from the end of the text (word boundaries, lookbehinds, the start of a line) the package
overlooks some partial matches, and of a few other constructs we do not know. Their start is always the whole window
back.
"""

import time
from typing import NamedTuple

import regex

from rollout_engine.sampling_params import STOP_REGEX_SECONDS, STOP_REGEX_WINDOW

_NOT_PARTIAL = regex.compile(
    r"""\\[bBmMGK]                            # boundaries, search anchor, keep
    | \(\? (?: <[=!] | [(&R\d] | P[>&] )       # lookbehinds, conditions, recursion
    | \(\? [a-zA-Z-]* [mrbepw]               # flags: multiline, reverse, kinds of matching
    | (?<! \\[pPNx] ) \{ [^}]* [a-z]         # fuzzy matching""",
    regex.VERBOSE,
)
"""Constructs in a pattern whose partial matches are not relied on."""
_SECONDS_PER_SEARCH = 0.001
"""Seconds each search may take on average, beyond `STOP_REGEX_SECONDS` once."""


class StopMatch(NamedTuple):
    """Where in the text a pattern was found."""

    start: int
    end: int
    pattern: str


class StopPatterns:
    """The patterns of one sample."""

    def __init__(self, patterns: list[str]) -> None:
        self._patterns = [regex.compile(pattern) for pattern in patterns]  # compiled at the door: a look-up
        self._is_partial = [_NOT_PARTIAL.search(pattern) is None for pattern in patterns]
        self._starts = [0] * len(patterns)
        self._seconds_left = STOP_REGEX_SECONDS

    @property
    def held_from(self) -> int:
        """Text from here on may still become a match."""
        return min(self._starts)

    def search(self, text: str, min_end: int) -> StopMatch | None:
        """The match in `text` that begins first, of those that end at `min_end` or later; ties go to the first pattern.

        `text` grows from call to call. Raises `TimeoutError`, naming the pattern, when all searches of the sample
        together have taken longer than is allowed.
        """
        found = [match for place in range(len(self._patterns)) if (match := self._search(place, text, min_end))]
        return min(found, key=lambda match: match.start, default=None)

    def _search(self, place: int, text: str, min_end: int) -> StopMatch | None:
        pattern, start = self._patterns[place], self._starts[place]
        began, self._seconds_left = time.thread_time(), self._seconds_left + _SECONDS_PER_SEARCH
        timeout = max(self._seconds_left, _SECONDS_PER_SEARCH)
        try:
            match = None
            if self._is_partial[place]:
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
        self._starts[place] = max(start, len(text) - STOP_REGEX_WINDOW)
        return None if match is None else StopMatch(*match.span(), pattern.pattern)
