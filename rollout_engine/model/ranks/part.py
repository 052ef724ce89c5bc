"""Which part of a weight a rank holds, under each name that the weight has."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.errors import ConfigError
from rollout_engine.model.ranks.share import Share


class Part(NamedTuple):
    """The rows of one named weight that a rank holds."""

    view: Tensor
    """Their live storage [rows.size, ...]."""
    rows: Share
    """Rows along the first dimension; of an expert's own weight all or none."""

    @property
    def elements(self) -> tuple[int, int]:
        """The elements [start, end) of the whole, row-major, that the rows are."""
        size = math.prod(self.view.shape[1:])
        return self.rows.first * size, self.rows.stop * size


def part_of(name: str, whole: Tensor, owner: Tensor, live: Tensor, share: Share | None) -> Part:
    """The part under a name that denotes the view `whole` of the parameter `owner`, of which `live` holds some rows.

    `share`: these rows; None: all of them. Raises `ConfigError` for a name whose elements are in an order that cannot
    be cut by rows.
    """
    count = len(whole) if whole.dim() else 1
    offset = whole.storage_offset() - owner.storage_offset()
    if share is None or share.is_whole:
        view = torch.as_strided(live, whole.shape, whole.stride(), live.storage_offset() + offset)
        return Part(view, Share.all(count))
    row = owner.numel() // len(owner)
    inner = offset % row + sum((n - 1) * s for n, s in zip(whole.shape[1:], whole.stride()[1:], strict=True))
    step = whole.stride(0) if count > 1 else 0
    if inner + step * (count - 1) < row:  # within one row of the parameter, as an expert's weight is
        held = share.first <= offset // row < share.stop
        start = live.storage_offset() + offset - share.first * row if held else live.storage_offset()
        shape = whole.shape if held else (0, *whole.shape[1:])
        return Part(torch.as_strided(live, shape, whole.stride(), start), Share(0, count if held else 0, count))
    if step != row or inner >= row:
        raise ConfigError(
            f"tensor_parallel_size: '{name}' cannot be cut, because its values are not stored row by row. Leave "
            "tensor_parallel_size out."
        )
    before = offset // row
    first, stop = (min(max(edge - before, 0), count) for edge in (share.first, share.stop))
    start = live.storage_offset() + (before + first - share.first) * row + offset % row
    view = torch.as_strided(live, (stop - first, *whole.shape[1:]), whole.stride(), start)
    return Part(view, Share(first, stop, count))
