"""The how-tos of CONTRIBUTING.md as changes of files, so that a test can follow them letter for letter.

A sentence in front of each code block says where it goes, in one of these forms; the last one needs no block:

    A new file `PATH`:              At the end of `PATH`:
    In `PATH`, below `LINE`:        In `PATH`, above `LINE`:
    In `PATH`, `OLD` becomes `NEW`

LINE is a whole line of the file, without its indentation, and OLD a part of one; each stands there once.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HEADING = re.compile(r"^## How to add an? (.+)$", re.MULTILINE)
_CODE = r"(?P<{0}_ticks>`+)(?P<{0}>.+?)(?P={0}_ticks)"
_PATH = r"`(?P<path>[\w./]+)`"
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```\n", re.MULTILINE | re.DOTALL)
WHOLE = re.compile(rf"(?P<form>A new file|At the end of) {_PATH}[^`:.]*:\s*\Z")
BESIDE = re.compile(rf"In {_PATH}, (?P<form>below|above) {_CODE.format('line')}[^`:.]*:\s*\Z")
PART = re.compile(rf"In {_PATH},\s{_CODE.format('old')}\sbecomes\s{_CODE.format('new')}")


class Change(NamedTuple):
    """One change of a file: `apply` makes its new text of the old one, which is "" for a new file."""

    path: str
    num_lines: int
    apply: Callable[[str], str]


class HowTo(NamedTuple):
    """One how-to of the page."""

    changes: list[Change]
    commands: list[str]
    """Lines of its sh blocks."""

    @property
    def num_lines(self) -> int:
        """Lines that it has a contributor write, blank ones not counted."""
        return sum(change.num_lines for change in self.changes)

    @property
    def paths(self) -> list[str]:
        """The files that it changes, each once."""
        return list(dict.fromkeys(change.path for change in self.changes))

    def follow(self, root: Path) -> None:
        """Make its changes below `root`. AssertionError for a place that is not there, or there twice."""
        for change in self.changes:
            path = root / change.path
            old = path.read_text(encoding="utf-8") if path.exists() else ""
            path.write_text(change.apply(old), encoding="utf-8")


def howtos(page: str) -> dict[str, HowTo]:
    """The how-tos of a page by what they add: "verb", "weight transport"."""
    starts = list(HEADING.finditer(page))
    ends = [page.find("\n## ", start.end()) for start in starts]
    return {each.group(1): _howto(page[each.end() : end]) for each, end in zip(starts, ends, strict=True)}


def _howto(section: str) -> HowTo:
    changes, commands, place = [], [], 0
    for block in BLOCK.finditer(section):
        before, place = _in_one_line(section[place : block.start()]), block.end()
        text = re.sub(f"^{block['indent']}", "", block["text"], flags=re.MULTILINE)
        changes += map(_part, PART.finditer(before))
        if block["language"] == "sh":
            commands += text.splitlines()
        else:
            changes.append(_change(before, text))
    return HowTo(changes + list(map(_part, PART.finditer(_in_one_line(section[place:])))), commands)


def _in_one_line(prose: str) -> str:
    return re.sub(r"\n\s*", " ", prose)


def _change(before: str, text: str) -> Change:
    size = sum(map(bool, text.split("\n")))
    if whole := WHOLE.search(before):
        is_new = whole["form"] == "A new file"
        return Change(whole["path"], size, (lambda old: text) if is_new else lambda old: f"{old.rstrip()}\n\n\n{text}")
    beside = BESIDE.search(before)
    assert beside, f"no sentence says where this block goes:\n{before[-200:]}{text}"
    shift = beside["form"] == "below"
    return Change(beside["path"], size, lambda old: _insert(old, beside["line"], shift, text))


def _insert(old: str, line: str, shift: bool, text: str) -> str:
    lines = old.splitlines(keepends=True)
    places = [index for index, each in enumerate(lines) if each.strip() == line.strip()]
    assert len(places) == 1, f"{len(places)} lines are {line!r}"
    lines.insert(places[0] + shift, text)
    return "".join(lines)


def _part(match: re.Match[str]) -> Change:
    before, after = match["old"], match["new"]

    def replace(text: str) -> str:
        assert text.count(before) == 1, f"{match['path']} has {before!r} {text.count(before)} times"
        return text.replace(before, after)

    return Change(match["path"], 1, replace)
