"""Maps views of stacked matrices to places among packed panels.

Thirty-two rows of a matrix, each padded to whole units, are the bytes of one panel (`kernels.cpu.gemm`). So the values
of a parameter can be staged in the memory of its panels, with their own strides, and packed in place.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.linear_groups import LinearGroup


class Stack(NamedTuple):
    """A storage that holds matrices of one shape, one per group; more than one only for experts."""

    groups: list[LinearGroup]
    like: Tensor
    """[N, K], on meta."""
    is_transposed: bool
    """Whether the storage holds them as [K, N]."""
    start: int
    """Number of matrices in earlier stacks."""

    @classmethod
    def of(cls, storage: torch.UntypedStorage, groups: Sequence[LinearGroup], start: int) -> "Stack | None":
        """The stack of the groups whose weights are in `storage`; None if their layout is another."""
        weights = sorted(((group.weight(), group) for group in groups), key=lambda pair: pair[0].data_ptr())
        like = weights[0][0].to("meta").contiguous()
        places = [storage.data_ptr() + i * like.nbytes for i in range(len(weights))]
        is_transposed = not weights[0][0].is_contiguous()
        fits = all(w.shape == like.shape and (w.mT if is_transposed else w).is_contiguous() for w, _ in weights)
        fits &= [w.data_ptr() for w, _ in weights] == places and storage.nbytes() == len(weights) * like.nbytes
        return cls([group for _, group in weights], like, is_transposed, start) if fits else None

    def place(self, view: Tensor) -> "Place":
        """The place among panels of a plain `view` of the storage."""
        num_panels, units, panel = gemm.panels_like(self.like)
        padded_columns = units * 4 // self.like.itemsize
        size, padded_size = self.like.numel(), num_panels * panel * padded_columns

        def move_index(index: int) -> int:
            matrix, index = divmod(index, size)
            row, column = divmod(index, self.like.shape[1])
            if self.is_transposed:
                column, row = divmod(index, self.like.shape[0])
            return matrix * padded_size + row * padded_columns + column

        steps = [(n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True)]
        strides = [move_index(stride) for stride in view.stride()]
        offset = int(view.storage_offset())
        last = offset + sum(steps)
        # If a step runs over the end of a row or matrix, padding is in between.
        reached = move_index(offset) + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
        assert reached == move_index(last), (
            f"a view of shape {tuple(view.shape)} runs across matrices {self.like.shape}"
        )
        first, offset = divmod(offset, size)
        end = self.start + last // size + 1
        return Place(self.start + first, end, move_index(offset), tuple(view.shape), tuple(strides))


class Place(NamedTuple):
    """A strided view into the panels of matrices [first, end), counted over all stacks."""

    first: int
    end: int
    offset: int
    """Elements from the start of matrix `first`."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the elements, row-major, are in the order of their addresses."""
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride < reach:
                return False
            reach += (size - 1) * stride
        return True

    def spans(self, ranges: "Iterable[tuple[int, int]] | None", like: Tensor) -> Iterator[tuple[int, int, bool]]:
        """Elements of padded rows, from the start of matrix `first` on, that ranges of elements span, and whether they
        fill them. None: all elements; ranges are only for a place that `is_ordered`.

        `like`: [N, K], the shape of the matrices.
        """
        _, units, _ = gemm.panels_like(like)
        padded_columns = units * 4 // like.itemsize
        is_whole = self.shape[1:] == like.shape[1:] and self.strides == (padded_columns, 1)
        reach = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        for start, end in [(0, math.prod(self.shape))] if ranges is None else ranges:
            if start == end:
                continue
            low = self.offset if ranges is None else self._address(start)
            high = 1 + (self.offset + reach if ranges is None else self._address(end - 1))
            if is_whole and high % padded_columns == like.shape[1]:  # the rest of that row is padding
                high = -(-high // padded_columns) * padded_columns
            yield low, high, is_whole

    def _address(self, index: int) -> int:
        address = self.offset
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            index, position = divmod(index, size)
            address += position * stride
        return address

    def within(self, panels: Tensor, dtype: torch.dtype) -> Tensor:
        """The view of staged rows, given the panels of matrix `first`."""
        rows = gemm.rows_of(panels, dtype)
        return torch.as_strided(rows, self.shape, self.strides, rows.storage_offset() + self.offset)


def stacks_of(groups: Iterable[LinearGroup], excluded: set[int]) -> dict[int, Stack]:
    """Stacks by the address of their storage; storages in `excluded` are left out."""
    by_storage: dict[int, tuple[torch.UntypedStorage, list[LinearGroup]]] = {}
    for group in groups:
        storages = {s.data_ptr(): s for s in (child.weight.untyped_storage() for child in group.children)}
        for address, storage in storages.items():
            if len(storages) == 1 and address not in excluded:
                by_storage.setdefault(address, (storage, []))[1].append(group)
    found: dict[int, Stack] = {}
    start = 0
    for address, (storage, members) in by_storage.items():
        if stack := Stack.of(storage, members, start):
            found[address] = stack
            start += len(members)
    return found
