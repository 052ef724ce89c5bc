"""The figures of the house, from the imports of every file: rooms, floors, arrows, circles and lines.

    python -m tests.contract.house

A room is a folder of `rollout_engine` with all below it, or one of the packages beside it. An arrow runs from a room to
another one that a file of it imports. A room stands one floor above the highest room that it imports; an arrow points
up if it leads to a room that docs/architecture.md names further down. Files that import each other are a circle.
"""

import re
from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from tests.contract.sources import PACKAGES, ROOT, Source, read_sources

FACE = "rollout_engine"


class House(NamedTuple):
    """`floors`: by room, 1 is the ground. `arrows` and `upward`: (from, to). `circle`: its files, empty without one."""

    floors: dict[str, int]
    arrows: set[tuple[str, str]]
    upward: set[tuple[str, str]]
    circle: list[str]
    lines: Counter[str]


def room_of(module: str) -> str:
    """The room of a dotted module: `rollout_engine.fleet.plan.brain` stands in `fleet`, `sync.store` in `sync`."""
    parts = module.split(".")
    return parts[1] if parts[0] == FACE and len(parts) > 1 else parts[0]


def rooms_from_the_ground(page: str) -> list[str]:
    """The rooms in the order of the page's table, and the package's own face on `base`, whose version it shows."""
    names = [re.findall(r"`([\w.]+)`", row.split("|")[1]) for row in re.findall(r"^\| `.*$", page, re.MULTILINE)]
    rooms = list(dict.fromkeys(name.split(".")[0] for row in names for name in row))
    rooms.insert(rooms.index("base") + 1, FACE)
    return rooms


def measure(sources: Iterable[Source], order: list[str]) -> House:
    """The figures of `sources`; `order`: the rooms from the ground up. Raises ValueError for a room that it lacks."""
    sources = [source for source in sources if source.in_package]
    modules = {source.module for source in sources}
    imports = {source.module: set(_imported(source, modules)) for source in sources}
    places = {room: place for place, room in enumerate(order)}
    unknown = sorted({room_of(module) for module in modules} - set(places))
    if unknown:
        raise ValueError(f"docs/architecture.md has no row for {', '.join(unknown)}")
    arrows = {(room_of(m), room_of(found)) for m, names in imports.items() for found in names}
    arrows = {(above, below) for above, below in arrows if above != below}
    upward = {(above, below) for above, below in arrows if places[above] < places[below]}
    floors: dict[str, int] = {}
    for room in sorted({room_of(module) for module in modules}, key=places.__getitem__):
        floors[room] = 1 + max((floors[b] for a, b in arrows - upward if a == room), default=0)
    lines = Counter[str]()
    for source in sources:
        lines[room_of(source.module)] += source.text.count("\n")
    return House(floors, arrows, upward, _circle(imports), lines)


def _imported(source: Source, modules: set[str]) -> Iterable[str]:
    for found in source.imports():
        if found.name in modules - {source.module} and not source.is_for_editors(found):
            yield found.name


def _circle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> None:
    """Print the house from the top floor down."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    house = measure(read_sources(PACKAGES), rooms_from_the_ground(page))
    for floor in range(max(house.floors.values()), 0, -1):
        rooms = [f"{room} {house.lines[room]:,}" for room, on in sorted(house.floors.items()) if on == floor]
        print(f"{floor:3}  {'   '.join(rooms)}")
    print(
        f"{len(house.floors)} rooms, {max(house.floors.values())} floors, {len(house.arrows)} arrows, "
        f"{len(house.upward)} of them upward ({', '.join(f'{a} -> {b}' for a, b in sorted(house.upward))}), "
        f"{'a circle: ' + ' -> '.join(house.circle) if house.circle else 'no circle'}, "
        f"{house.lines.total():,} lines of Python"
    )


if __name__ == "__main__":
    main()
