"""The panels of packed weights that an update replaces; all others stay in use.

room        [ rows | rows | rows ]      choose: panels that new values only reach into begin as those in use
            [ panel| panel| panel]      pack
few bytes   copied over the panels in use at the commit
many        all other panels are copied next to them before; the commit swaps
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.stacks import Place

COPIED_BYTES = 32 << 20
"""This much may be copied while steps wait, which takes some five milliseconds."""
COPIED_SHARE = 1 / 8
"""And this much of all panels: to copy them takes about a quarter of a decode step, which reads all."""
Ranges: TypeAlias = list[tuple[int, int]]
"""Half-open ranges, ascending, that do not touch."""


class ChangedPanels:
    """Panels by their matrix. Each step is called once, in the order of the drawing.

    Args:
        likes: the matrices [N, K], on meta.
        places: destinations of new values, with the ranges of their elements, row-major; None: the whole place.
    """

    def __init__(self, likes: Sequence[Tensor], places: Iterable[tuple[Place, Ranges | None]] = ()) -> None:
        self._likes = likes
        whole: dict[int, Ranges] = {}
        """Panels all of whose values are new."""
        touched: dict[int, Ranges] = {}
        for place, ranges in places:
            like = likes[place.first]
            for low, high, is_filled in place.spans(ranges, like):
                _add(touched, place.first, like, low, high, 0)
                if is_filled:
                    _add(whole, place.first, like, low, high, 1)
        self.panels = {index: joined(ranges) for index, ranges in sorted(touched.items())}
        self._reached = {index: without(ranges, joined(whole.get(index, []))) for index, ranges in self.panels.items()}
        self.is_swapped = False
        """The commit swaps, since `complete` was called."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels."""
        return sum((end - first) * _panel_bytes(self._likes[i]) for i, r in self.panels.items() for first, end in r)

    def carry(self, live: Sequence[Tensor], room: Sequence[Tensor]) -> None:
        """Stage the values in use of panels of which only some values are new."""
        self._move(gemm.UNPACK, self._reached, live, room)

    def pack(self, live: Sequence[Tensor], room: Sequence[Tensor]) -> None:
        """Pack the staged values; if they are many, also copy all other panels next to them."""
        self._move(gemm.PACK, self.panels, room, room)
        self.is_swapped = self.num_bytes > max(COPIED_BYTES, COPIED_SHARE * sum(panels.nbytes for panels in room))
        if self.is_swapped:
            others = {i: without([(0, len(panels))], self.panels.get(i, [])) for i, panels in enumerate(live)}
            self._move(gemm.COPY, others, live, room)

    def copy(self, live: Sequence[Tensor], room: Sequence[Tensor]) -> None:
        """Copy the packed panels over those in use."""
        self._move(gemm.COPY, self.panels, room, live)

    def _move(self, move: int, panels: dict[int, Ranges], source: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        gemm.move_panels(
            move,
            [
                (_pack_panels(source[index], self._likes[index], first, end), out[index][first:end])
                for index, ranges in panels.items()
                for first, end in ranges
            ],
        )


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges in order, those that touch or overlap joined; empty ones are left out."""
    found: Ranges = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Parts of `ranges` that are in none of `others`."""
    found: Ranges = []
    for start, end in ranges:
        for low, high in others:
            if low < end and start < high:
                found.append((start, low))
                start = high
        found.append((start, end))
    return [(start, end) for start, end in found if start < end]


def _add(panels: dict[int, Ranges], first: int, like: Tensor, low: int, high: int, inwards: int) -> None:
    """Add the panels that elements [low, high) of padded rows reach into, or, with `inwards`, fill."""
    num_panels, _, _ = gemm.panels_like(like)
    size = _panel_bytes(like) // like.itemsize
    start, end = (-(-low // size), high // size) if inwards else (low // size, -(-high // size))
    while start < end:
        matrix, panel = divmod(start, num_panels)
        count = min(end - start, num_panels - panel)
        panels.setdefault(first + matrix, []).append((panel, panel + count))
        start += count


def _panel_bytes(like: Tensor) -> int:
    _, units, panel = gemm.panels_like(like)
    return 4 * units * panel


def _rows(like: Tensor, first: int, end: int) -> Tensor:
    """The rows of these panels."""
    return like[first * gemm.PANEL : end * gemm.PANEL]


def _pack_panels(panels: Tensor, like: Tensor, first: int, end: int) -> gemm.PackedWeight:
    return gemm.PackedWeight.like(_rows(like, first, end), panels[first:end])
