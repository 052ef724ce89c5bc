"""The shadow of weights that steps read in place: their next values, until a commit copies them over the live ones."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from rollout_engine.model.backend import ShadowMemory
from rollout_engine.weights.coverage import byte_runs, merged


class Shadow:
    """Storages of the next values, each allocated once and used again by later updates."""

    def __init__(self, memory: ShadowMemory) -> None:
        self._memory = memory
        self._storages: dict[int, UntypedStorage] = {}
        """Shadows by the address of the live storage."""
        self._copy: Callable[[], None] | None = None
        self._copy_some: Callable[[], None] | None = None
        """Copies what `plan_some` was given, once."""

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

    def plan_some(self, views: Iterable[Tensor]) -> None:
        """Prepare the next `commit` for these live views only."""
        self._copy_some = self._memory.prepare_copy(list(self._pairs(views)))

    def carry(self, views: Iterable[Tensor]) -> None:
        """Stage all live values of storages of which the views are parts."""
        parts = {view.untyped_storage().data_ptr(): view for view in views}
        for view in parts.values():
            next_values, live = self.of(view), view.untyped_storage()
            if view.nbytes < live.nbytes():
                _bytes_of(next_values.untyped_storage()).copy_(_bytes_of(live))

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
            source, target = _bytes_of(self._storages[address]), _bytes_of(members[0].untyped_storage())
            for start, end in merged(*map(byte_runs, members)).tolist():
                yield source[start:end], target[start:end]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
