"""The shadow of weights that steps read in place: their next values, until a commit copies them over the live ones."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from rollout_engine.model.backend import ShadowMemory
from rollout_engine.weights.coverage import Runs, byte_runs, gaps, merged

_NO_RUNS = np.empty((0, 2), np.int64)


class Shadow:
    """Storages of the next values, each allocated once and used again by later updates."""

    def __init__(self, memory: ShadowMemory) -> None:
        self._memory = memory
        self._storages: dict[int, UntypedStorage] = {}
        """Shadows by the address of the live storage."""
        self._copy: Callable[[], None] | None = None
        self._copy_some: Callable[[], None] | None = None
        """Copies what `plan_some` was given, once."""
        self._staged: dict[int, Runs] = {}
        """The byte runs of `plan_some`, by the address of the live storage."""

    def of(self, view: Tensor) -> Tensor:
        """The place of a live view's next values."""
        live = view.untyped_storage()
        if live.data_ptr() not in self._storages:
            try:
                self._storages[live.data_ptr()] = self._memory.allocate(live.nbytes())
            except Exception:  # a part of a shadow is of no use, and steps may need the memory
                self.clear()
                raise
            self._copy = None
        storage = self._storages[live.data_ptr()]
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        return empty.set_(storage, view.storage_offset(), view.shape, view.stride())

    def holds(self, view: Tensor) -> bool:
        """Whether the view has a shadow."""
        return view.untyped_storage().data_ptr() in self._storages

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
            self._staged[address] = merged(*(runs for _, runs in members))
            live, runs = members[0][0].untyped_storage(), self._staged[address]
            pairs += _bytes_in(self._storages[address], live, runs)
        self._copy_some = self._memory.prepare_copy(pairs)

    def completed(self, view: Tensor) -> Tensor:
        """The next values of a view after `plan_some`: what was not staged of them is taken from the live ones."""
        runs = byte_runs(view)
        place, live = self.of(view), view.untyped_storage()
        staged = self._staged.get(live.data_ptr(), _NO_RUNS)
        for target, source in _bytes_in(place.untyped_storage(), live, gaps(merged(runs), staged)):
            target.copy_(source)
        return place

    def commit(self) -> None:
        """Copy the shadows of the planned views over them."""
        copy, self._copy_some = self._copy_some or self._copy, None
        assert copy is not None, "commit follows plan"
        copy()

    def clear(self) -> None:
        """Free the memory."""
        self._storages, self._copy = {}, None

    def tensors(self) -> Iterator[Tensor]:
        """Every storage as uint8 [n]."""
        return map(_bytes_of, self._storages.values())

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _pairs(self, views: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(next, live) bytes of the views in runs as long as possible: a copy view by view may be strided."""
        by_storage: dict[int, list[Tensor]] = {}
        for view in views:
            by_storage.setdefault(view.untyped_storage().data_ptr(), []).append(view)
        for address, members in by_storage.items():
            runs = merged(*map(byte_runs, members))
            yield from _bytes_in(self._storages[address], members[0].untyped_storage(), runs)


def _bytes_in(first: UntypedStorage, second: UntypedStorage, runs: Runs) -> list[tuple[Tensor, Tensor]]:
    """The same byte runs of two storages."""
    a, b = _bytes_of(first), _bytes_of(second)
    return [(a[start:end], b[start:end]) for start, end in runs.tolist()]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
