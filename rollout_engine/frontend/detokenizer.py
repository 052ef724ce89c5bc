"""The text of one completion: decoded as tokens come, ended by stop strings, without the token that stopped it."""

from collections.abc import Collection, Sequence

from rollout_engine.frontend.stop_strings import stop_automaton
from rollout_engine.frontend.text_stream import TextStream
from rollout_engine.sampling_params import SamplingParams


class Detokenizer:
    """Turns the tokens of one completion into text.

    Stop strings are found at the token that completes them, the earliest first, the longest of those that end
    together. Without stop strings nothing is decoded before somebody reads the text. A stop token that ends the
    sequence is not decoded at all: no stop string can end in it.
    """

    def __init__(self, stream: TextStream, params: SamplingParams, stop_token_ids: Collection[int] = ()) -> None:
        """`stop_token_ids` end the sequence from `min_tokens` on, the checkpoint's end ids among them."""
        self._stream = stream
        self._cut_token_ids = frozenset() if params.include_stop_str_in_output else frozenset(stop_token_ids)
        self._stops = stop_automaton(tuple(params.stop)) if params.stop else None
        self._keep_stop = params.include_stop_str_in_output
        self._num_tokens_before_stop = params.min_tokens
        self._undecoded: list[int] = []
        self._text = ""
        self._state = 0
        self._finished = False
        self.stop: str | None = None
        """The stop string that ended the text."""

    def push(self, token_ids: Sequence[int]) -> int:
        """Take tokens; returns how many belong to the completion: all, or up to the one that completed a stop."""
        num_left = self._num_tokens_before_stop - len(token_ids)
        ends = num_left <= 0 and bool(token_ids) and token_ids[-1] in self._cut_token_ids
        text_ids = token_ids[:-1] if ends else token_ids
        if self._stops is None:
            self._num_tokens_before_stop = num_left
            self._undecoded += text_ids
            return len(token_ids)
        for count, token_id in enumerate(text_ids, start=1):
            self._num_tokens_before_stop -= 1
            self._append(self._stream.push([token_id]))
            if self.stop is not None:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """Nothing follows: no text is held back any more."""
        if self.stop is None:
            self._decode()
            self._append(self._stream.flush())
        self._finished = True

    def text(self) -> str:
        """What is certain so far: neither half a character nor what may yet become a stop string."""
        self._decode()
        if self._stops is None or self._finished or self._keep_stop or self.stop is not None:
            return self._text
        return self._text[: len(self._text) - self._stops.num_held[self._state]]

    def _decode(self) -> None:
        if self._undecoded:
            self._append(self._stream.push(self._undecoded))
            self._undecoded = []

    def _append(self, new: str) -> None:
        start = len(self._text)
        self._text += new
        if self._stops is None:
            return
        for end, char in enumerate(new, start=start + 1):
            self._state = self._stops.step(self._state, char)
            found = self._stops.match[self._state]
            if found is not None and self._num_tokens_before_stop <= 0:
                self.stop = found
                self._text = self._text[: end if self._keep_stop else end - len(found)]
                return
