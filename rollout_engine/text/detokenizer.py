"""Decodes the tokens of one completion as they arrive, up to a stop token, stop string or stop pattern."""

from collections.abc import Collection, Sequence

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.text.stop_patterns import StopPatterns
from rollout_engine.text.stop_strings import stop_automaton
from rollout_engine.text.text_stream import TextStream


class Detokenizer:
    """Turns the tokens of one completion into text.

    Stop strings are found at the token that completes them, the earliest first, the longest of those that end
    together; stop patterns at the first token with a match, if no stop string ends in it. Without either, tokens are
    decoded when the text is read. A stop token that ends the sequence is not decoded at all: no stop string can end in
    it.
    """

    def __init__(self, stream: TextStream, params: SamplingParams, stop_token_ids: Collection[int] = ()) -> None:
        """`stop_token_ids`: ids that end the sequence from `min_tokens` on, including the checkpoint's end ids."""
        self._stream = stream
        self._cut_token_ids = frozenset() if params.include_stop_str_in_output else frozenset(stop_token_ids)
        self._stops = stop_automaton(tuple(params.stop)) if params.stop else None
        self._patterns = StopPatterns(params.stop_regex) if params.stop_regex else None
        self._keep_stop = params.include_stop_str_in_output
        self._num_tokens_before_stop = params.min_tokens
        self._undecoded: list[int] = []
        self._text = ""
        self._state = 0
        self._first_end: int | None = None
        """Earliest position in the text at which a match of a pattern may end; None before `min_tokens`."""
        self._finished = False
        self.stop: str | None = None
        """The stop string or pattern that ended the text."""
        self.error: str | None = None
        """Why the search for patterns failed; nothing is decoded after that."""

    def push(self, token_ids: Sequence[int]) -> int:
        """Add tokens. Returns how many belong to the completion: all, or those up to the one that completed a stop."""
        num_left = self._num_tokens_before_stop - len(token_ids)
        ends = num_left <= 0 and bool(token_ids) and token_ids[-1] in self._cut_token_ids
        text_ids = token_ids[:-1] if ends else token_ids
        if self._stops is None and self._patterns is None:
            self._num_tokens_before_stop = num_left
            self._undecoded += text_ids
            return len(token_ids)
        for count, token_id in enumerate(text_ids if self.error is None else (), start=1):
            self._num_tokens_before_stop -= 1
            self._append(self._stream.push([token_id]))
            if self.stop is not None or self.error is not None:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """End the text, and release the text held back."""
        if self.stop is None and self.error is None:
            self._decode()
            self._append(self._stream.flush())
        self._finished = True

    def text(self) -> str:
        """Return the text that is final: no half character, and nothing that may yet become a stop string."""
        self._decode()
        if self._finished or self.stop is not None:
            return self._text
        end = len(self._text)
        if self._stops is not None and not self._keep_stop:
            end -= self._stops.num_held[self._state]
        if self._patterns is not None:
            end = min(end, self._patterns.held_from)
        return self._text[:end]

    def _decode(self) -> None:
        if self._undecoded:
            self._append(self._stream.push(self._undecoded))
            self._undecoded = []

    def _append(self, new: str) -> None:
        start = len(self._text)
        self._text += new
        if self._stops is not None:
            self._find_string(start, new)
        if self._patterns is not None and self.stop is None and new:
            self._find_pattern(self._patterns, start)

    def _find_string(self, start: int, new: str) -> None:
        assert self._stops is not None
        for end, char in enumerate(new, start=start + 1):
            self._state = self._stops.step(self._state, char)
            found = self._stops.match[self._state]
            if found is not None and self._num_tokens_before_stop <= 0:
                self.stop = found
                self._text = self._text[: end if self._keep_stop else end - len(found)]
                return

    def _find_pattern(self, patterns: StopPatterns, start: int) -> None:
        """Search after a token added the text from `start` on. Matches that end before `min_tokens` do not count."""
        min_end = len(self._text) + 1
        if self._num_tokens_before_stop <= 0:
            min_end = self._first_end = start + 1 if self._first_end is None else self._first_end
        try:
            found = patterns.search(self._text, min_end)
        except TimeoutError as problem:
            self.error = str(problem)
            return
        if found is not None:
            self.stop = found.pattern
            self._text = self._text[: found.end if self._keep_stop else found.start]
