"""Which part of a weight a rank holds, under each name that the weight has."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.ranks.share import Share
from sync.pieces import sections


class Region(NamedTuple):
    """Elements [first, stop) of a whole weight, row-major, or some columns of them."""

    first: int
    stop: int
    columns: Share | None = None
    """Columns of the last dimension that it has, in each of its rows; None: all."""

    def within(self, start: int, stop: int) -> "Region":
        """The region's elements in [start, stop) of the whole, maybe none; these are rows if columns are cut."""
        assert self.columns is None or start % self.columns.whole == stop % self.columns.whole == 0
        first, last = max(self.first, start), min(self.stop, stop)
        return self._replace(first=first, stop=last) if first < last else self._replace(first=start, stop=start)

    def of(self, values: Tensor, start: int) -> Tensor:
        """A view of its elements in `values` [N], elements of the whole from `start` on: [n], or [rows, columns]."""
        found = values[self.first - start : self.stop - start]
        return found if self.columns is None else found.view(-1, self.columns.whole)[:, self.columns.rows]

    def pieces(self, held: Tensor, start: int, stop: int) -> "Iterator[tuple[Tensor, Region]]":
        """Elements [start, stop) of the whole that are in `held`, which has the region's: (view of it, its region)."""
        row, kept = (1, 1) if self.columns is None else (self.columns.whole, self.columns.size)
        found = self.within(start, stop)
        low, high = ((edge - self.first) // row * kept for edge in (found.first, found.stop))
        for view, begin, end in sections(held, low, high):
            first, last = (self.first + edge // kept * row for edge in (begin, end))
            yield view, self._replace(first=first, stop=last)


class Part(NamedTuple):
    """A rank's part of one named weight."""

    view: Tensor
    """Its live storage: some rows, or of all rows some columns. Of an expert's own weight all or none."""
    region: Region


def part_of(
    name: str, whole: Tensor, owner: Tensor, live: Tensor, share: Share | None, columns: Share | None = None
) -> Part:
    """The part under a name that denotes the view `whole` of the parameter `owner`, of which `live` holds some rows.

    `share`: these rows; None: all of them. `columns`: `live` holds these of all rows. Raises `ConfigError` for a name
    whose elements are in an order that cannot be cut so.
    """
    count = len(whole) if whole.dim() else 1
    offset = whole.storage_offset() - owner.storage_offset()
    if columns is not None:
        if whole.shape != owner.shape or whole.stride() != owner.stride():
            raise _not_cut(name, "column by column", "Give deterministic=True, or leave")
        return Part(live, Region(0, whole.numel(), columns))
    if share is None or share.is_whole:
        view = torch.as_strided(live, whole.shape, whole.stride(), live.storage_offset() + offset)
        return Part(view, Region(0, whole.numel()))
    row = owner.numel() // len(owner)
    inner = offset % row + sum((n - 1) * s for n, s in zip(whole.shape[1:], whole.stride()[1:], strict=True))
    step = whole.stride(0) if count > 1 else 0
    if inner + step * (count - 1) < row:  # within one row of the parameter, as an expert's weight is
        held = share.first <= offset // row < share.stop
        start = live.storage_offset() + offset - share.first * row if held else live.storage_offset()
        shape = whole.shape if held else (0, *whole.shape[1:])
        return Part(torch.as_strided(live, shape, whole.stride(), start), Region(0, whole.numel() if held else 0))
    if step != row or inner >= row:
        raise _not_cut(name, "row by row", "Leave")
    before = offset // row
    first, stop = (min(max(edge - before, 0), count) for edge in (share.first, share.stop))
    start = live.storage_offset() + (before + first - share.first) * row + offset % row
    view = torch.as_strided(live, (stop - first, *whole.shape[1:]), whole.stride(), start)
    size = math.prod(whole.shape[1:])
    return Part(view, Region(first * size, stop * size))


def _not_cut(name: str, order: str, advice: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size: '{name}' cannot be cut, because its values are not stored {order}. {advice} "
        "tensor_parallel_size out."
    )
