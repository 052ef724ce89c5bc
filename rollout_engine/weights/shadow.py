"""The shadow of weights that steps read in place: their next values, until a commit copies them over the live ones."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from rollout_engine.model.backend import ShadowMemory
from rollout_engine.weights.coverage import Runs, byte_runs, gaps, merge_runs

_ALIGNMENT = 512
"""Bytes, as torch aligns storages on a device: copies move up to 16 at a time."""
_NO_RUNS = np.empty((0, 2), np.int64)


class Shadow:
    """The next values of live storages; memory is allocated once and used again by later updates."""

    def __init__(self, memory: ShadowMemory) -> None:
        self._memory = memory
        self._places: dict[int, Tensor] = {}
        """Shadows, uint8, by the address of the live storage."""
        self._copy: Callable[[], None] | None = None
        self._copy_some: Callable[[], None] | None = None
        """Copies the values given to `plan_some`, once."""
        self._staged: dict[int, Runs] = {}
        """The byte runs of `plan_some`, by the address of the live storage."""

    def of(self, view: Tensor) -> Tensor:
        """The place of a live view's next values."""
        live = view.untyped_storage()
        if live.data_ptr() not in self._places:
            self._allocate({live.data_ptr(): live.nbytes()})
        place = self._places[live.data_ptr()]
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        start = place.storage_offset() // view.itemsize + view.storage_offset()
        return empty.set_(place.untyped_storage(), start, view.shape, view.stride())

    def reserve(self, views: Iterable[Tensor]) -> None:
        """Allocate the memory that these live views lack, in one piece: all of it, or nothing and a memory error."""
        if sizes := self._lacking(views):
            self._allocate(sizes)

    def num_bytes_lacking(self, views: Iterable[Tensor]) -> int:
        """Bytes of the live storages of these views that have no shadow."""
        return sum(self._lacking(views).values())

    def _lacking(self, views: Iterable[Tensor]) -> dict[int, int]:
        """Address -> bytes of these views' live storages without a shadow."""
        storages = [view.untyped_storage() for view in views if not self.holds(view)]
        return {live.data_ptr(): live.nbytes() for live in storages if live.nbytes()}

    def _allocate(self, sizes: dict[int, int]) -> None:
        """One piece of memory for live storages of these addresses and sizes."""
        starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()), initial=0))
        try:
            memory = _bytes_of(self._memory.allocate(starts[-1] if len(sizes) > 1 else sum(sizes.values())))
        except Exception:  # a part of a shadow is of no use, and steps may need the memory
            self.clear()
            raise
        for (address, size), start in zip(sizes.items(), starts, strict=False):
            self._places[address] = memory[start : start + size]
        self._copy = None

    def holds(self, view: Tensor) -> bool:
        """Whether the view has a shadow."""
        return view.untyped_storage().data_ptr() in self._places

    def plan(self, views: Iterable[Tensor]) -> None:
        """Prepare `commit` for these live views, which are all that have a shadow."""
        self._copy_some = None
        if self._copy is None:
            self._copy = self._memory.prepare_copy(list(self._pairs(views)))

    def plan_some(self, parts: Iterable[tuple[Tensor, Runs]]) -> None:
        """Prepare the next `commit` for these byte runs of the storages of live views only."""
        by_storage: dict[int, list[tuple[Tensor, Runs]]] = {}
        for view, runs in parts:
            by_storage.setdefault(view.untyped_storage().data_ptr(), []).append((view, runs))
        pairs: list[tuple[Tensor, Tensor]] = []
        self._staged = {}
        for address, members in by_storage.items():
            self._staged[address] = merge_runs(*(runs for _, runs in members))
            live, runs = members[0][0].untyped_storage(), self._staged[address]
            pairs += _bytes_in(self._places[address], _bytes_of(live), runs)
        self._copy_some = self._memory.prepare_copy(pairs)

    def complete_view(self, view: Tensor) -> Tensor:
        """The next values of a view after `plan_some`: parts that were not staged are taken from the live ones."""
        runs = byte_runs(view)
        place, live = self.of(view), view.untyped_storage()
        staged = self._staged.get(live.data_ptr(), _NO_RUNS)
        held = self._places[live.data_ptr()]
        for target, source in _bytes_in(held, _bytes_of(live), gaps(merge_runs(runs), staged)):
            target.copy_(source)
        return place

    def commit(self) -> None:
        """Copy the shadows of the planned views over them."""
        copy, self._copy_some = self._copy_some or self._copy, None
        assert copy is not None, "commit follows plan"
        copy()

    def clear(self) -> None:
        """Free the memory."""
        self._places, self._copy = {}, None

    def tensors(self) -> Iterator[Tensor]:
        """The shadow of every storage, uint8 [n]."""
        return iter(self._places.values())

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(place.nbytes for place in self._places.values())

    def _pairs(self, views: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(next, live) bytes of the views in runs as long as possible: a copy view by view may be strided."""
        by_storage: dict[int, list[Tensor]] = {}
        for view in views:
            by_storage.setdefault(view.untyped_storage().data_ptr(), []).append(view)
        for address, members in by_storage.items():
            runs = merge_runs(*map(byte_runs, members))
            yield from _bytes_in(self._places[address], _bytes_of(members[0].untyped_storage()), runs)


def _bytes_in(first: Tensor, second: Tensor, runs: Runs) -> list[tuple[Tensor, Tensor]]:
    """The same byte runs of two tensors, uint8."""
    return [(first[start:end], second[start:end]) for start, end in runs.tolist()]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
