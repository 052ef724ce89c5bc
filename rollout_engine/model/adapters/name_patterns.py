"""Patterns of module names, as `rank_pattern` and `alpha_pattern` of peft have them, matched in linear time.

peft takes them for regular expressions, which may keep Python's engine, and with it the interpreter, busy for years.
Here a pattern is an automaton whose states are followed together: (length of the name) x (states) steps at most.

    understood   literals, `.`, `[...]`, `(...)`, `(?:...)`, `|`, `* + ? {m,n}`, `^`, `$`, escapes of signs, d, w, s
    refused      everything else: look-around, references to groups, flags, possessive quantifiers
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

MAX_CHARS = 1000
"""Longest pattern."""
_MAX_STATES = 5000
_MAX_REPEAT = 100
_MAX_DEPTH = 50
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
_PLAIN = re.compile(r"[\w.-]+")
_AT_START, _AT_END = "at the start", "at the end"

Test = Callable[[str], bool]
_Step = tuple[Test | str | None, int]
"""To another state: by a character that passes the test, at one end of the name, or freely (None)."""


class PatternError(ValueError):
    """A pattern that is not understood, or too large."""


class NamePattern:
    """A pattern. It fits a name as in peft: the whole name, or all of it behind some dot."""

    def __init__(self, pattern: str) -> None:
        """Raises `PatternError`."""
        if len(pattern) > MAX_CHARS:
            raise PatternError(f"it has {len(pattern)} characters; at most {MAX_CHARS} are read")
        self._plain = pattern if _PLAIN.fullmatch(pattern) else ""
        """The pattern, if it has no operator but the dot, as nearly all have."""
        parser = _Parser(pattern)
        self._steps, ends = parser.steps, parser.whole()
        self._start, self._end = ends
        self.num_states = 0 if self._plain else len(self._steps)
        """States to follow for each character of a name."""

    def fits(self, name: str) -> bool:
        """Whether it fits the name of a module."""
        if plain := self._plain:
            before, tail = name[: -len(plain)], name[-len(plain) :]
            is_behind_dot = not before or before.endswith(".")
            return is_behind_dot and len(tail) == len(plain) and (tail == plain or _fits_dots(plain, tail))
        length, now = len(name), set[int]()
        for place in range(length + 1):
            if place == 0 or name[place - 1] == ".":
                now.add(self._start)
            now = self._freely(now, place == 0, place == length)
            if place < length:
                char = name[place]
                now = {to for state in now for test, to in self._steps[state] if callable(test) and test(char)}
        return self._end in now

    def _freely(self, states: set[int], is_first: bool, is_last: bool) -> set[int]:
        """The states, and all that are reached from them without a character."""
        found, todo = set(states), list(states)
        while todo:
            for test, to in self._steps[todo.pop()]:
                is_open = test is None or (test == _AT_START and is_first) or (test == _AT_END and is_last)
                if is_open and to not in found:
                    found.add(to)
                    todo.append(to)
        return found


def _fits_dots(plain: str, text: str) -> bool:
    """Whether the texts are equal except at dots of the first."""
    return all(ours in (".", its) for ours, its in zip(plain, text, strict=True))


@lru_cache(maxsize=4096)
def name_pattern(pattern: str) -> NamePattern:
    """The pattern, read once. Raises `PatternError`."""
    return NamePattern(pattern)


class _Part(NamedTuple):
    """A piece of the automaton."""

    start: int
    end: int


class _Parser:
    """Reads a pattern, by recursive descent, into the steps of an automaton."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0
        self.steps: list[list[_Step]] = []
        """From each state."""

    def whole(self) -> _Part:
        """The automaton of the whole pattern."""
        part = self._alternatives()
        if self._place < len(self._pattern):
            raise self._error("a parenthesis closes what none opened")
        return part

    def _alternatives(self) -> _Part:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"its parentheses are nested more than {_MAX_DEPTH} deep")
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        self._depth -= 1
        if len(branches) == 1:
            return branches[0]
        whole = _Part(self._state(), self._state())
        for branch in branches:
            self._join(whole.start, branch.start)
            self._join(branch.end, whole.end)
        return whole

    def _sequence(self) -> _Part:
        start = end = self._state()
        while self._peek() not in ("", "|", ")"):
            place = self._place
            part = self._atom()
            least, most = self._quantifier()
            after = self._place
            if self._pattern[place] in "^$" and after > place + 1:
                raise self._error("there is nothing to repeat")
            if (least, most) != (1, 1):
                part = self._repeat(part, place, least, most)
                self._place = after
            self._join(end, part.start)
            end = part.end
        return _Part(start, end)

    def _repeat(self, first: _Part, place: int, least: int, most: int | None) -> _Part:
        """An atom, read again at `place` for each copy, `least` to `most` times; None: any number."""
        start = end = self._state()
        exits = [end]
        copies = max(least, 1) if most is None else most
        for number in range(copies):
            part = first if number == 0 else self._again(place)
            self._join(end, part.start)
            end = part.end
            if number + 1 >= least:
                exits.append(end)
            if most is None and number + 1 == copies:
                self._join(part.end, part.start)
        out = self._state()
        for each in exits if least == 0 else exits[1:]:
            self._join(each, out)
        return _Part(start, out)

    def _again(self, place: int) -> _Part:
        self._place = place
        return self._atom()

    def _atom(self) -> _Part:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise self._error("a group that begins with (?: or ( is read, no other kind")
            part = self._alternatives()
            if not self._take(")"):
                raise self._error("a parenthesis is not closed")
            return part
        if char in "*+?{":
            raise self._error(f"there is nothing for {char!r} to repeat")
        if char in "^$":
            return self._one(_AT_START if char == "^" else _AT_END)
        if char == ".":
            return self._one(lambda char: True)
        if char == "[":
            return self._one(self._set())
        return self._one(self._read_escape() if char == "\\" else char.__eq__)

    def _read_escape(self) -> Test:
        char = self._next()
        if char.lower() in _CLASSES:
            test = _CLASSES[char.lower()]
            return test if char.islower() else lambda other: not test(other)
        if char.isalnum() or not char:
            raise self._error(f"\\{char} is not read")
        return char.__eq__

    def _set(self) -> Test:
        is_negated, tests, is_first = self._take("^"), list[Test](), True
        while is_first or self._peek() != "]":
            tests.append(self._member())
            is_first = False
        self._next()
        return lambda char: any(test(char) for test in tests) != is_negated

    def _member(self) -> Test:
        low = self._next()
        if not low:
            raise self._error("a bracket is not closed")
        if low == "\\":
            return self._read_escape()
        if self._peek() == "-" and self._pattern[self._place + 1 : self._place + 2] not in ("]", ""):
            self._next()
            high = self._next()
            if high == "\\" or high < low:
                raise self._error("a range of characters is not in order")
            return lambda char: low <= char <= high
        return low.__eq__

    def _quantifier(self) -> tuple[int, int | None]:
        """How often the atom before may stand: at least, and at most (None: any number)."""
        char = self._peek()
        if char not in ("*", "+", "?", "{"):
            return 1, 1
        self._next()
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char) or self._counts()
        self._take("?")  # laziness changes the content of a group, not the names that fit
        if self._peek() in ("*", "+", "?", "{"):
            raise self._error("a repetition is repeated without parentheses")
        return bounds

    def _counts(self) -> tuple[int, int | None]:
        inside, brace, rest = self._pattern[self._place :].partition("}")
        low, comma, high = inside.partition(",")
        numbers = [int(each) if each.isascii() and each.isdigit() else None for each in (low or "0", high or "0")]
        if not brace or None in numbers or len(inside) > 10 or not (low or high):
            raise self._error("a repetition is {m}, {m,} or {m,n}")
        self._place = len(self._pattern) - len(rest)
        least = numbers[0] or 0
        most = (numbers[1] if high else None) if comma else least
        if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise self._error(f"a repetition is of {_MAX_REPEAT} times at most, and its bounds are in order")
        return least, most

    def _one(self, test: Test | str) -> _Part:
        part = _Part(self._state(), self._state())
        self.steps[part.start].append((test, part.end))
        return part

    def _join(self, start: int, end: int) -> None:
        self.steps[start].append((None, end))

    def _state(self) -> int:
        if len(self.steps) == _MAX_STATES:
            raise self._error("it is too large")
        self.steps.append([])
        return len(self.steps) - 1

    def _peek(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _next(self) -> str:
        char = self._peek()
        self._place += 1
        return char

    def _take(self, char: str) -> bool:
        is_there = self._peek() == char
        self._place += is_there
        return is_there

    def _error(self, what: str) -> PatternError:
        return PatternError(f"{what}, at character {min(self._place, len(self._pattern))}")
