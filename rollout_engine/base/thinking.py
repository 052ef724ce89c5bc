"""Budgets of thinking: which tokens of a sequence are forced, as a function of its tokens.

    closed ── thinking_start ──> open ── thinking_end ──> closed
                                  │
                                  └── after `budget` sampled tokens: thinking_end is forced, token by token

A prompt leaves it open if its last tag is a thinking_start. The runner follows a sequence's tokens before it draws the
next one, and the front end follows the same tokens to mark the forced ones in results. So no message has marks, and a
sequence that was preempted, moved to another engine or replayed is forced as before.
"""

from collections.abc import Iterable, Sequence
from copy import copy

import msgspec


class Tag(msgspec.Struct, frozen=True):
    """A text as token ids spell it: an automaton that counts how much of the text ends at a token.

    State s: the last s bytes of the sequence's text are the first s of the tag's; for a tag that is a token of its own
    that token counts as one byte.
    """

    length: int
    """The state in which the text is complete."""
    moves: dict[int, list[int]]
    """Token id -> the state that it leads to, and behind it pairs of a state and the other one that it leads to from
    there. Tokens that are not listed lead to state 0."""

    def move(self, state: int, token_id: int) -> int:
        """The state after a token."""
        moves = self.moves.get(token_id)
        if moves is None:
            return 0
        for place in range(1, len(moves), 2):
            if moves[place] == state:
                return moves[place + 1]
        return moves[0]

    def states(self, token_ids: Iterable[int]) -> list[int]:
        """The states after each token of a text that begins in state 0, up to the one that completes the tag."""
        found = [0]
        for token_id in token_ids:
            if found[-1] == self.length:
                break
            found.append(self.move(found[-1], token_id))
        return found[1:]


class Thinking(msgspec.Struct, frozen=True):
    """The budget of one request, in token ids."""

    budget: int
    """Sampled tokens inside thinking at most, in all its parts together."""
    is_open: bool
    """Whether the prompt ends inside thinking."""
    start: Tag
    end: Tag
    closing: list[int]
    """The tokens that are forced: `end`, as the tokenizer spells it."""

    def problem(self) -> str:
        """Why it cannot be followed; "" if it can."""
        for name, tag in (("start", self.start), ("end", self.end)):
            if tag.length < 1:
                return f"{name} is empty"
            for token_id, moves in tag.moves.items():
                if len(moves) % 2 == 0 or min(moves) < 0 or max(moves) > tag.length:
                    return f"{name}.moves[{token_id}] does not fit length {tag.length}"
        if self.end.states(self.closing)[-1:] != [self.end.length]:
            return "closing does not complete the end"
        return "" if self.budget >= 0 else "its budget is negative"


class ThinkingState:
    """The state of one sequence; it follows the tokens."""

    __slots__ = ("_is_open", "_matched", "_num_followed", "_place", "_rule", "_states", "num_sampled")

    def __init__(self, rule: Thinking, num_prompt_tokens: int) -> None:
        self._rule = rule
        self._is_open = rule.is_open
        self._matched = 0
        """State of the tag that is looked for."""
        self._states = [0, *rule.end.states(rule.closing)]
        self._place = 0
        """Tokens of the closing text that were forced in this part."""
        self._num_followed = num_prompt_tokens
        self.num_sampled = 0
        """Tokens that were sampled inside thinking."""

    def next_forced(self, token_ids: Sequence[int]) -> int | None:
        """The token behind `token_ids`, prompt included, if it is forced."""
        for token_id in token_ids[self._num_followed :]:
            self.append(token_id)
        if not self._is_open or self.num_sampled < self._rule.budget:
            return None
        return self._rule.closing[self._place or self._first_forced]

    @property
    def _first_forced(self) -> int:
        """Place in the closing text of the first forced token: behind those that the policy has sampled itself."""
        return self._states.index(self._matched) if self._matched in self._states else 0

    def append(self, token_id: int) -> bool:
        """Follow one token. Returns whether it was forced."""
        self._num_followed += 1
        if not self._is_open:
            self._matched = self._rule.start.move(self._matched, token_id)
            if self._matched == self._rule.start.length:
                self._is_open, self._matched = True, 0
            return False
        is_forced = self.num_sampled >= self._rule.budget
        place = (self._place or self._first_forced) if is_forced else 0
        self._matched = self._rule.end.move(self._matched, token_id)
        if self._matched == self._rule.end.length:
            self._is_open, self._matched, self._place = False, 0, 0
        elif is_forced:
            self._place = (place + 1) % len(self._rule.closing)
        else:
            self.num_sampled += 1
        return is_forced

    def fork(self) -> "ThinkingState":
        """A state that follows other tokens from here on."""
        return copy(self)

    def may_force(self, token_ids: Sequence[int], position: int) -> bool:
        """Whether the token at `position` of a sequence that begins with `token_ids` may be forced.

        True is certain only if these are all the tokens before it.
        """
        self.next_forced(token_ids)
        num_unknown = position - self._num_followed
        if self._is_open:
            return self.num_sampled + num_unknown >= self._rule.budget
        return num_unknown > 0 and self.num_sampled + num_unknown - 1 >= self._rule.budget


def count_sampled(rule: Thinking, token_ids: Iterable[int]) -> int:
    """Tokens of an output that were sampled inside thinking."""
    state = ThinkingState(rule, 0)
    for token_id in token_ids:
        state.append(token_id)
    return state.num_sampled


def ends_open(start: Tag, end: Tag, token_ids: Iterable[int]) -> bool:
    """Whether a prompt ends inside thinking: its last complete tag is a `start`."""
    is_open, matched = False, 0
    for token_id in token_ids:
        tag = end if is_open else start
        matched = tag.move(matched, token_id)
        if matched == tag.length:
            is_open, matched = not is_open, 0
    return is_open
