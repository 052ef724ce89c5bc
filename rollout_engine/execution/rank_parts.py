"""One rank's part of weights: staging and reading pieces of whole weights that pass through the window."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from rollout_engine.model.ranks.part import Part
from rollout_engine.model.ranks.share import Share
from rollout_engine.weights.held_weights import WeightHolder
from sync.manifest import torch_dtype
from sync.pieces import sections


class RankParts:
    """The weights of one rank, seen as rows of whole ones.

    Args:
        weights: hold them, under the names of which the rank has some rows.
        parts: these rows, by name; of names of which it has none too.
        window: uint8, as `Meeting.window`.
    """

    def __init__(self, weights: WeightHolder, parts: Mapping[str, Part], window: Tensor) -> None:
        self.weights, self._window = weights, window
        self.rows: dict[str, Share] = {name: part.rows for name, part in parts.items()}
        self.elements = {name: part.elements for name, part in parts.items()}
        """Name -> the rank's elements of the whole weight, [first, stop)."""
        self._dtypes = {name: torch_dtype(dtype) for name, (dtype, _) in weights.metadata.items()}
        self._read: tuple[str, Tensor] | None = None
        """The weight that was read last, and its values: those of a packed one are made anew each time."""

    def itemsize(self, name: str) -> int:
        """Bytes of an element; 0 of a weight of which this rank has no rows."""
        return self._dtypes[name].itemsize if name in self._dtypes else 0

    def known(self, names: list[str]) -> list[str]:
        """Those of `names` of which this rank has rows."""
        return [name for name in names if name in self._dtypes]

    def stage(self, name: str, start: int, stop: int, *, inplace: bool) -> None:
        """Stage what is this rank's of elements [start, stop) of a weight, which are in the window."""
        if self._overlaps(name, start, stop):
            place = self.weights.place(name, inplace=inplace)
            for view, piece in self._pieces(name, start, stop, place):
                view.copy_(piece.view(view.shape))

    def read(self, name: str, start: int, stop: int) -> None:
        """Write what is this rank's of elements [start, stop) of a live weight into the window."""
        if not self._overlaps(name, start, stop):
            return
        if self._read is None or self._read[0] != name:
            self._read = name, self.weights.values(name)
        for view, piece in self._pieces(name, start, stop, self._read[1]):
            piece.view(view.shape).copy_(view)
        if stop >= self.elements[name][1]:
            self._read = None

    def _overlaps(self, name: str, start: int, stop: int) -> bool:
        first, last = self.elements[name]
        return name in self._dtypes and max(first, start) < min(last, stop)

    def _pieces(self, name: str, start: int, stop: int, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(view of `tensor`, the same elements in the window)."""
        first, last = self.elements[name]
        dtype = self._dtypes[name]
        window = self._window[: (stop - start) * dtype.itemsize].view(dtype)
        low, high = max(first, start), min(last, stop)
        for view, begin, end in sections(tensor, low - first, high - first):
            yield view, window[first + begin - start : first + end - start]
