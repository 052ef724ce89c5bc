"""Which bytes a set of tensor views covers, exactly.

A model's weights can be named in more than one way (a fused parameter, or its parts), so "everything was sent, nothing
twice" is a statement about bytes, not about names. A view is a set of byte runs of its storage; runs are compared as
sorted intervals.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from sync.pieces import Part

Runs = np.ndarray
"""int64 [num_runs, 2]: half-open byte intervals of one storage."""


class Coverage:
    """The bytes of every name, and which of them a choice of names leaves out or covers twice."""

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._runs = {name: byte_runs(view) for name, view in views.items()}
        self._by_storage: dict[int, list[str]] = {}
        for name, view in views.items():
            self._by_storage.setdefault(view.untyped_storage().data_ptr(), []).append(name)
        self.canonical = [name for names in self._by_storage.values() for name in self._disjoint(names)]
        """In order, every name that does not overlap the names taken before it."""
        self._num_bytes = self._size(self.canonical)

    def missing(self, chosen: set[str]) -> list[str]:
        """Names that cover, each byte once, the bytes left out by `chosen`, which do not overlap."""
        if self._size(chosen) == self._num_bytes:
            return []
        return [
            name
            for names in self._by_storage.values()
            for name in self._disjoint([n for n in names if n in chosen] + [n for n in names if n not in chosen])
            if name not in chosen
        ]

    def overlapping(self, chosen: set[str]) -> list[str]:
        """Chosen names that cover a byte which an earlier chosen name covers already."""
        doubled: list[str] = []
        for names in self._by_storage.values():
            here = [name for name in names if name in chosen]
            taken = set(self._disjoint(here))
            doubled += [name for name in here if name not in taken]
        return doubled

    def _size(self, names: Iterable[str]) -> int:
        return sum(int((self._runs[name][:, 1] - self._runs[name][:, 0]).sum()) for name in names)

    def _disjoint(self, names: list[str]) -> list[str]:
        if not _overlap(*(self._runs[name] for name in names)):
            return names
        taken: list[str] = []
        covered = np.empty((0, 2), np.int64)
        for name in names:
            if not _overlap(covered, self._runs[name]):
                taken.append(name)
                covered = np.concatenate([covered, self._runs[name]])
        return taken


def byte_runs(view: Tensor) -> Runs:
    """The maximal byte runs of a strided view, relative to its storage; none for a view without elements."""
    if view.numel() == 0:
        return np.empty((0, 2), np.int64)
    sizes, strides = list(view.shape), list(view.stride())
    length = 1
    while sizes and (sizes[-1] == 1 or strides[-1] == length):
        length *= sizes.pop()
        strides.pop()
    starts = np.array([view.storage_offset()], np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    width = view.element_size()
    return np.stack([starts * width, (starts + length) * width], axis=1)


def storage_runs(view: Tensor, part: Part | None) -> Runs:
    """The byte runs of pieces of a contiguous view, relative to its storage; None: of any view as a whole."""
    if part is None:
        return byte_runs(view)
    return np.array(part.runs, np.int64).reshape(-1, 2) + int(view.storage_offset()) * view.element_size()


def merge_runs(*several: Runs) -> Runs:
    """All runs in order, those that touch or overlap joined."""
    runs = _sort_runs(several)
    ends = np.maximum.accumulate(runs[:, 1])
    begins = np.ones(len(runs), bool)
    begins[1:] = runs[1:, 0] > ends[:-1]
    lasts = np.append(begins[1:], True)[: len(runs)]
    return np.stack([runs[begins, 0], ends[lasts]], axis=1)


def gaps(runs: Runs, covered: Runs) -> Runs:
    """The bytes of `runs` that `covered` leaves out; both are in order and disjoint."""
    found: list[tuple[int, int]] = []
    taken = covered.tolist()
    for start, end in runs.tolist():
        for low, high in taken:
            if high <= start or low >= end:
                continue
            if start < low:
                found.append((start, low))
            start = high
        if start < end:
            found.append((start, end))
    return np.array(found, np.int64).reshape(-1, 2)


def _sort_runs(several: Sequence[Runs]) -> Runs:
    runs = np.concatenate([np.empty((0, 2), np.int64), *several])
    return runs[runs[:, 0].argsort(kind="stable")]


def _overlap(*several: Runs) -> bool:
    runs = _sort_runs(several)
    return bool((runs[1:, 0] < runs[:-1, 1]).any())
