"""The share of the weights that an update changes, estimated from a few of their elements.

An exact count would read every live weight once more, most of them from packed copies. Here up to 1,024 elements of up
to 128 tensors are compared with those of the update before; at first with those that were loaded. A tensor is chosen
by its size, so that every element of the model counts alike. That takes about 2 ms, whatever the size of the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sync.manifest import TensorSpec
from sync.pieces import Lacking

_NUM_POINTS = 128
"""Points, evenly spaced over all elements in order of names, whose tensors are looked at."""
_NUM_ROWS, _NUM_COLUMNS = 32, 32
"""Elements of a tensor that are compared."""
_LEAST_KNOWN = 0.5
"""Share of the points that must have earlier values: below it there is no estimate."""


class ChangedShare:
    """The elements of live weights that updates are compared with. Names are those under which weights arrived last.

    Args:
        views: live values by name, each weight once; elements are copied.
    """

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._num_elements = sum(view.numel() for view in views.values())
        self._live = {name: _elements_of(view) for name, view in views.items()}

    def forget(self) -> None:
        """Forget the elements: their weights have lost their values."""
        self._live = {}

    def measure(
        self, specs: Iterable[TensorSpec], lacking: Lacking | None, staged: Callable[[str], Tensor]
    ) -> tuple[float | None, dict[str, Tensor]]:
        """The share of the model's elements that an update changes, and the elements to keep for the next one.

        Args:
            specs: of the tensors of the update; the share counts others as unchanged.
            lacking: the pieces that were staged, if the rest is live already.
            staged: the next values of a name. Only their staged parts are read.
        """
        sizes = {spec.name: math.prod(spec.shape) for spec in sorted(specs, key=lambda spec: spec.name)}
        total, chosen = sum(sizes.values()), _by_size(sizes)
        found: dict[str, Tensor] = {}
        changed, num_known = 0.0, 0
        for name, count in chosen.items():
            before = self._live.get(name)
            if lacking is not None and name not in lacking:
                num_known += count
                found |= {} if before is None else {name: before}
                continue
            part = None if lacking is None else lacking[name]
            if part is not None and before is None:
                continue  # no values of the pieces that stay
            after = _elements_of(staged(name))
            if part is not None and before is not None:
                after = torch.where(_is_staged(part.spec.shape, part.elements), after, before)
            found[name] = after
            if before is not None and before.shape == after.shape:
                num_known += count
                changed += count * (before != after).float().mean().item()
        if num_known < _LEAST_KNOWN * chosen.total() or not total:
            return None, found
        return changed / num_known * min(total / max(self._num_elements, 1), 1.0), found

    def keep(self, found: Mapping[str, Tensor]) -> None:
        """Compare the next update with these elements, and with no others: other names may denote the same weights."""
        self._live = dict(found)


def _by_size(sizes: Mapping[str, int]) -> Counter[str]:
    """Name -> number of points that are in its tensor."""
    total, chosen, end, point = sum(sizes.values()), Counter[str](), 0, 0
    for name, size in sizes.items():
        end += size
        while point < _NUM_POINTS and (2 * point + 1) * total < 2 * end * _NUM_POINTS:
            chosen[name] += 1
            point += 1
    return chosen


def _rows_of(view: Tensor) -> Tensor:
    """A view [rows, columns] of some elements of a tensor: at most `_NUM_ROWS` times `_NUM_COLUMNS`."""
    if view.dim() < 2:
        return view.reshape(1, -1)[:, : _NUM_ROWS * _NUM_COLUMNS]
    while view.dim() > 2:
        view = view.select(1, view.shape[1] // 2)
    step = max(1, -(-view.shape[0] // _NUM_ROWS))
    return view[step // 2 :: step, :_NUM_COLUMNS]


def _elements_of(view: Tensor) -> Tensor:
    return _rows_of(view).clone()


def _is_staged(shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Which of the elements that `_rows_of` takes of a contiguous tensor are in these ranges, which are in order."""
    rows = _rows_of(torch.empty(*shape, device="meta"))
    down, across = (torch.arange(size) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    position = down[:, None] + across + int(rows.storage_offset())
    starts, ends = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 2).unbind(1)
    last = torch.searchsorted(starts.contiguous(), position, right=True) - 1
    return (last >= 0) & (position < ends[last.clamp(min=0)])
