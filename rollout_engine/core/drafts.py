"""The sources of one prompt's drafts: its runs, and the places of each three tokens in a row in them.

A run is a list of tokens: the prompt, an earlier sample of it, or a sample in flight. If the last three tokens of a
sequence occurred before, the tokens that followed them are its draft. Of several such places the one before which most
tokens agree wins, and of those the newest.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NUM_KEY_TOKENS = 3
"""Tokens that must agree before a place is looked at."""
MAX_MATCH = 16
"""Agreeing tokens are counted up to here."""
_NUM_CANDIDATES = 8
"""Most places that are compared."""
_TOKEN_BITS = 32
_KEY_MASK = (1 << (_TOKEN_BITS * NUM_KEY_TOKENS)) - 1
_PLACE_MASK = (1 << _TOKEN_BITS) - 1


class Place(NamedTuple):
    """A place to draft from."""

    run: int
    """Number of the run."""
    at: int
    """Index of the next token in it."""
    num_matched: int
    """Tokens before it that agree."""


class PromptDrafts:
    """The runs of one prompt: lists of tokens, and the places of each three tokens in a row in them."""

    def __init__(self, key: bytes, prompt: list[int]) -> None:
        self.key = key
        self.num_users = 0
        """Live sequences that draft from here."""
        self.num_indexed = 0
        """Tokens."""
        self.runs: list[list[int]] = []
        """The owner of a run may append to it, and then calls `index`."""
        self._newest: dict[int, int] = {}
        """Three tokens as one number -> the newest place behind them: run number << 32 | index."""
        self._before: dict[int, int] = {}
        """Place -> the place before it behind the same tokens."""
        self.index(self.add(prompt), 0)

    def add(self, run: list[int]) -> int:
        """Add a run, not indexed yet. Returns its number."""
        self.runs.append(run)
        return len(self.runs) - 1

    def index(self, run: int, start: int) -> None:
        """Make the tokens of a run findable, from index `start` on."""
        tokens, newest, before = self.runs[run], self._newest, self._before
        first = max(start, NUM_KEY_TOKENS - 1)
        key = _key(tokens[first - NUM_KEY_TOKENS + 1 : first])
        place = run << _TOKEN_BITS | first
        for token in tokens[first:]:
            key = (key << _TOKEN_BITS | token) & _KEY_MASK
            place += 1
            previous = newest.get(key)
            if previous is not None:
                before[place] = previous
            newest[key] = place
        self.num_indexed += max(len(tokens) - start, 0)

    def find(self, tokens: list[int], left_out: Iterable[int] = ()) -> Place | None:
        """The best place to continue from behind `tokens`, not in the runs `left_out`."""
        if len(tokens) < NUM_KEY_TOKENS:
            return None
        best = None
        place = self._newest.get(_key(tokens[-NUM_KEY_TOKENS:]))
        for _ in range(_NUM_CANDIDATES):
            if place is None:
                break
            run, at = place >> _TOKEN_BITS, place & _PLACE_MASK
            if at < len(self.runs[run]) and run not in left_out:
                num_matched = _num_matched(self.runs[run], at, tokens)
                if best is None or num_matched > best.num_matched:
                    best = Place(run, at, num_matched)
                    if num_matched == MAX_MATCH:
                        break
            place = self._before.get(place)
        return best


@dataclass(slots=True, eq=False)
class Draft:
    """The source of one sequence's drafts."""

    prompt: PromptDrafts
    own_run: int
    num_seen: int
    """Tokens of the sequence that were compared and indexed."""
    run: int = -1
    """The run that is followed; -1: none."""
    at: int = 0
    """Index of its next token."""
    num_matched: int = 0
    """Tokens before that one which agree, up to `MAX_MATCH`; 0 right behind one that did not."""
    num_misses: int = 0
    """Wrong tokens since the last right one."""


def _key(tokens: list[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _TOKEN_BITS | token
    return key


def _num_matched(run: list[int], at: int, tokens: list[int]) -> int:
    """How many tokens before `run[at]` are the last of `tokens`, up to `MAX_MATCH`."""
    most = min(MAX_MATCH, at, len(tokens))
    num = NUM_KEY_TOKENS
    while num < most and run[at - 1 - num] == tokens[-1 - num]:
        num += 1
    return num
