"""Finds stop strings as text arrives, one character at a time whatever their number (Aho and Corasick, 1975)."""

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """Matches all stop strings of a request at once. It is shared: each sample keeps only its state, 0 at the start.

    `match[state]` is the longest stop string that ends in this state, if any. `num_held[state]` is how many of the last
    characters may be the start of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.match: list[str | None] = [None]
        self.num_held = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.match.append(None)
                self.num_held.append(depth)
            state = self._next[state][char]
        self.match[state] = stop

    def _link(self) -> None:
        """Set the failure states, breadth first: the longest proper suffix that also begins a stop string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            self.match[state] = self.match[state] or self.match[fail]
            if not self._next[state]:
                self.num_held[state] = self.num_held[fail]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(fail, char)
                queue.append(child)


@lru_cache(maxsize=8)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of `stops`, which the requests of a batch share."""
    return StopAutomaton(stops)
