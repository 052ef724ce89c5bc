"""Parameters that are matrices one below another, and the same matrices among the panels that products run from.

Thirty-two rows of a matrix, each filled up to whole units, are the bytes of one panel (`kernels.cpu.gemm`). So the
values of a parameter can be gathered where its panels will be, at strides of their own, and packed in place.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.fusion import LinearGroup


class Stack(NamedTuple):
    """All of one storage: matrices of one shape, each what one group multiplies by.

    One, unless they are experts.
    """

    groups: list[LinearGroup]
    like: Tensor
    """[N, K], on meta."""
    start: int
    """How many matrices come before, in other stacks."""

    @classmethod
    def of(cls, storage: torch.UntypedStorage, groups: Sequence[LinearGroup], start: int) -> "Stack | None":
        """Of the groups whose weights lie in `storage`; None where it holds them in another way."""
        weights = sorted(((group.weight(), group) for group in groups), key=lambda pair: pair[0].data_ptr())
        like = weights[0][0].to("meta")
        places = [storage.data_ptr() + i * like.nbytes for i in range(len(weights))]
        fits = all(w.shape == like.shape and w.is_contiguous() for w, _ in weights)
        fits &= [w.data_ptr() for w, _ in weights] == places and storage.nbytes() == len(weights) * like.nbytes
        return cls([group for _, group in weights], like, start) if fits else None

    def place(self, view: Tensor) -> "Place":
        """Where the values of a plain `view` of the storage lie among panels."""
        num_panels, units, panel = gemm.panels_shape(self.like)
        padded_columns = units * 4 // self.like.itemsize
        size, padded_size = self.like.numel(), num_panels * panel * padded_columns

        def moved(index: int) -> int:
            matrix, index = divmod(index, size)
            row, column = divmod(index, self.like.shape[1])
            return matrix * padded_size + row * padded_columns + column

        steps = [(n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True)]
        strides = [moved(stride) for stride in view.stride()]
        last = view.storage_offset() + sum(steps)
        # Where a step runs over the end of a row or matrix, padding is in between.
        reached = moved(view.storage_offset()) + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
        assert reached == moved(last), f"a view of shape {tuple(view.shape)} runs across matrices {self.like.shape}"
        first, offset = divmod(view.storage_offset(), size)
        end = self.start + last // size + 1
        return Place(self.start + first, end, moved(offset), tuple(view.shape), tuple(strides))


class Place(NamedTuple):
    """A strided view into the panels of matrices [first, end) of all stacks, which lie one after another."""

    first: int
    end: int
    offset: int
    """In elements, from the start of matrix `first`."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def within(self, panels: Tensor, dtype: torch.dtype) -> Tensor:
        """The view, given the panels of matrix `first`, in which rows have been gathered."""
        rows = gemm.rows_of(panels, dtype)
        return torch.as_strided(rows, self.shape, self.strides, rows.storage_offset() + self.offset)


def stacks_of(groups: Iterable[LinearGroup], excluded: set[int]) -> dict[int, Stack]:
    """Every stack by the address of its storage, without storages in `excluded`."""
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
