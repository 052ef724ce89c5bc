"""The shadow of weights that steps read where they lie: their next values, until a commit copies them there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import psutil
import torch
from torch import Tensor, UntypedStorage

from rollout_engine.execution.coverage import byte_runs, merged


class Moves(Protocol):
    """How bytes come into a shadow and from there over the live ones."""

    @property
    def room(self) -> int:
        """Bytes free for shadows."""
        ...

    def allocate(self, num_bytes: int) -> UntypedStorage:
        """Memory for a shadow. Raises `WeightUpdateError` where there is none."""
        ...

    def beside_steps(self) -> AbstractContextManager[object]:
        """What is launched inside comes after the steps, and what else, that were launched before it was entered; later
        steps neither wait for it nor hold it up."""
        ...

    def overwriting(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """What copies every first of `pairs` over its second, as often as it is called, and returns when that is done.

        They are runs of bytes, uint8 [n], that keep their addresses; no two overlap.
        """
        ...


class HostMoves:
    """In the host's memory."""

    @property
    def room(self) -> int:
        """Of the system."""
        return psutil.virtual_memory().available

    def allocate(self, num_bytes: int) -> UntypedStorage:
        """Pages come as they are written."""
        return UntypedStorage(num_bytes)

    def beside_steps(self) -> AbstractContextManager[object]:
        """Nothing is launched ahead."""
        return nullcontext()

    def overwriting(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """As `Moves.overwriting`."""

        def overwrite() -> None:
            for source, target in pairs:
                target.copy_(source)

        return overwrite


class Shadow:
    """Storages of the next values, each allocated once and used again by later updates."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._storages: dict[int, UntypedStorage] = {}
        """By the address of the live storage."""
        self._overwrite: Callable[[], None] | None = None

    def of(self, view: Tensor) -> Tensor:
        """Where the next values of a live view are gathered."""
        live = view.untyped_storage()
        if live.data_ptr() not in self._storages:
            self._storages[live.data_ptr()] = self._allocated(live.nbytes())
            self._overwrite = None
        storage = self._storages[live.data_ptr()]
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        return empty.set_(storage, view.storage_offset(), view.shape, view.stride())

    def holds(self, view: Tensor) -> bool:
        """Whether there is a shadow of it."""
        return view.untyped_storage().data_ptr() in self._storages

    def plan(self, views: Iterable[Tensor]) -> None:
        """Prepare `commit` for these live views, of which all there is a shadow of are given."""
        if self._overwrite is None:
            self._overwrite = self._moves.overwriting(list(self._pairs(views)))

    def commit(self) -> None:
        """The live views of `plan` take the values of their shadows."""
        assert self._overwrite is not None, "commit follows plan"
        self._overwrite()

    def clear(self) -> None:
        """Let go of the memory."""
        self._storages, self._overwrite = {}, None

    def tensors(self) -> Iterator[Tensor]:
        """uint8, each storage."""
        return map(_bytes_of, self._storages.values())

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _allocated(self, num_bytes: int) -> UntypedStorage:
        try:
            return self._moves.allocate(num_bytes)
        except Exception:  # what steps need is not kept for a part of a shadow
            self.clear()
            raise

    def _pairs(self, views: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(next, live) bytes that views cover, in runs as long as can be: a copy of views may be strided."""
        by_storage: dict[int, list[Tensor]] = {}
        for view in views:
            by_storage.setdefault(view.untyped_storage().data_ptr(), []).append(view)
        for address, ours in by_storage.items():
            source, target = _bytes_of(self._storages[address]), _bytes_of(ours[0].untyped_storage())
            for start, end in merged(*map(byte_runs, ours)).tolist():
                yield source[start:end], target[start:end]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
