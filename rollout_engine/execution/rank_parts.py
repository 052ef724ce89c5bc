"""One rank's part of weights: staging and reading pieces of whole weights that pass through the window."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollout_engine.model.ranks.part import Part, Region
from rollout_engine.weights.held_weights import WeightHolder
from sync.manifest import torch_dtype


class Piece:
    """Elements [start, stop) of a whole weight of a dtype, which are, or will be, in the window."""

    def __init__(self, window: Tensor, start: int, stop: int, dtype: torch.dtype) -> None:
        self.start, self.stop = start, stop
        self._values = window[: (stop - start) * dtype.itemsize].view(dtype)

    def of(self, region: Region) -> Tensor:
        """A view of its elements that are in a region."""
        return region.within(self.start, self.stop).of(self._values, self.start)

    def bytes_of(self, region: Region) -> bytes:
        """The bytes of its elements that are in a region."""
        return self.of(region).contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    def write(self, region: Region, content: bytes) -> None:
        """Write its elements that are in a region, from the `bytes_of` a process that has another window."""
        place = self.of(region)
        if content:
            place.copy_(torch.frombuffer(bytearray(content), dtype=place.dtype).view(place.shape))


class RankParts:
    """The weights of one rank, seen as regions of whole ones.

    Args:
        weights: hold them, under the names of which the rank has something.
        parts: its parts, by name, also for names of which it has nothing.
        window: uint8, as `Meeting.window`.
    """

    def __init__(self, weights: WeightHolder, parts: Mapping[str, Part], window: Tensor) -> None:
        self.weights, self._window = weights, window
        self.regions = {name: part.region for name, part in parts.items()}
        """Name -> the rank's elements of the whole weight."""
        self._dtypes = {name: torch_dtype(dtype) for name, (dtype, _) in weights.metadata.items()}
        self._read: tuple[str, Tensor] | None = None
        """The weight that was read last, and its values: those of a packed one are made anew each time."""

    def known(self, names: list[str]) -> list[str]:
        """Those of `names` of which this rank has something."""
        return [name for name in names if name in self._dtypes]

    def stage(self, name: str, start: int, stop: int, *, inplace: bool) -> None:
        """Stage this rank's part of elements [start, stop) of a weight, which are in the window."""
        if self._overlaps(name, start, stop):
            place = self.weights.place(name, inplace=inplace)
            for view, given in self._pieces(name, start, stop, place):
                view.copy_(given.view(view.shape))

    def stage_sent(self, name: str, start: int, stop: int, content: bytes, *, inplace: bool) -> None:
        """Stage them if the window is the rank's own: `content` has the bytes of those that are this rank's."""
        if self._overlaps(name, start, stop):
            self._piece(name, start, stop).write(self.regions[name], content)
            self.stage(name, start, stop, inplace=inplace)

    def read(self, name: str, start: int, stop: int) -> None:
        """Write this rank's part of elements [start, stop) of a live weight into the window."""
        if not self._overlaps(name, start, stop):
            return
        if self._read is None or self._read[0] != name:
            self._read = name, self.weights.values(name)
        for view, place in self._pieces(name, start, stop, self._read[1]):
            place.view(view.shape).copy_(view)
        if stop >= self.regions[name].stop:
            self._read = None

    def read_and_send(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of this rank's elements in [start, stop) of a live weight, by a window that is the rank's own."""
        if not self._overlaps(name, start, stop):
            return b""
        self.read(name, start, stop)
        return self._piece(name, start, stop).bytes_of(self.regions[name])

    def _overlaps(self, name: str, start: int, stop: int) -> bool:
        found = self.regions[name].within(start, stop)
        return name in self._dtypes and found.first < found.stop

    def _piece(self, name: str, start: int, stop: int) -> Piece:
        return Piece(self._window, start, stop, self._dtypes[name])

    def _pieces(self, name: str, start: int, stop: int, held: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(view of `held`, the same elements in the window)."""
        piece = self._piece(name, start, stop)
        for view, region in self.regions[name].pieces(held, start, stop):
            yield view, piece.of(region)
