"""ctypes wrapper of `adapters.cpp`: low-rank adapters of many rows at once. Callers ask `supports` first."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error

_LANES, _PANEL = 16, 32
"""Columns of A.T and B.T that are stored together."""
BLOCK_ROWS = 4
"""Most rows that read an adapter's matrices together."""
_PRODUCTS_A_THREAD = 1 << 15
"""Fewer are done before another thread has woken up."""


class AdapterPair(NamedTuple):
    """One adapter's matrices for one linear layer, packed: it adds `scale * (x @ A.T) @ B.T` to the layer's output.

    The rank is padded with zeros to a multiple of 16, and so are the columns of B.T to one of 32.
    """

    a: Tensor
    """[rank / 16, in_features, 16]: A.T, in pieces of 16 columns."""
    b: Tensor
    """[out_features / 32, rank, 32], of the dtype of `a`: B.T, in pieces of 32 columns."""
    scale: float

    @classmethod
    def packed(cls, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> "AdapterPair":
        """Pack A [rank, in_features] and B [out_features, rank], rounded to `dtype`."""
        rank, pad = len(a), torch.nn.functional.pad
        wide = pad(a.detach().to(dtype), (0, 0, 0, -rank % _LANES))
        tall = pad(b.detach().to(dtype), (0, -rank % _LANES, 0, -len(b) % _PANEL))
        wide, tall = wide.unflatten(0, (-1, _LANES)), tall.unflatten(0, (-1, _PANEL))
        return cls(wide.transpose(1, 2).contiguous(), tall.transpose(1, 2).contiguous(), scale)

    def matrices(self, out_features: int) -> tuple[Tensor, Tensor]:
        """A.T [in_features, rank] and B.T [rank, out_features]."""
        wide, tall = (each.transpose(0, 1).flatten(1) for each in (self.a, self.b))
        return wide, tall[:, :out_features]


class AdapterRows(NamedTuple):
    """The rows of a batch that have an adapter, sorted by it."""

    rows: np.ndarray
    """int32 [N], row numbers in the batch."""
    slots: np.ndarray
    """int32 [N], the adapter of each; ascending."""
    blocks: np.ndarray
    """int32 [B, 3]: (first, count, slot) of consecutive entries of `rows` with one adapter."""

    @classmethod
    def of(
        cls, slots: Sequence[int] | np.ndarray, sizes: Sequence[int] | np.ndarray, block_rows: int = BLOCK_ROWS
    ) -> "AdapterRows | None":
        """Sort the rows of a batch made of runs of `sizes[i]` rows under adapter `slots[i]`, from 0; -1: none.

        `block_rows`: most rows of a block. None if no row has an adapter.
        """
        each = np.repeat(np.array(slots, np.int32), np.array(sizes, np.int64))
        rows = np.flatnonzero(each >= 0)
        if not len(rows):
            return None
        rows = rows[np.argsort(each[rows], kind="stable")].astype(np.int32)
        sorted_slots = each[rows]
        starts = [0, *(np.flatnonzero(np.diff(sorted_slots)) + 1).tolist(), len(rows)]
        blocks = [
            (first, min(block_rows, end - first), int(sorted_slots[begin]))
            for begin, end in zip(starts, starts[1:], strict=False)
            for first in range(begin, end, block_rows)
        ]
        return cls(rows, sorted_slots, np.array(blocks, np.int32))

    def among(self, wanted: np.ndarray, num_rows: int) -> "AdapterRows | None":
        """The rows with adapters among the `wanted` of the batch, which has `num_rows`, by places in `wanted`."""
        slots = np.full(num_rows, -1, np.int32)
        slots[self.rows] = self.slots
        return AdapterRows.of(slots.take(wanted, mode="clip"), np.ones(len(wanted), np.int64))

    @property
    def call(self) -> "RowsCall":
        """The rows as kernels read them; it keeps nothing alive."""
        return RowsCall(self.blocks.ctypes.data, self.rows.ctypes.data, len(self.blocks), len(self.rows))


class AdapterTable:
    """The pairs of `num_slots` adapters for linears that share an input and write side by side into one output.

    `sizes`: out_features of these linears. It keeps the tensors that it points to.
    """

    def __init__(self, num_slots: int, in_features: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.in_features, self.sizes, self.dtype = in_features, list(sizes), dtype
        self.pairs: list[list[AdapterPair | None]] = [[None] * len(self.sizes) for _ in range(num_slots)]
        self._parts = (_Part * (num_slots * len(self.sizes)))()
        self._ranks = [0] * num_slots
        """The largest of each adapter's pairs."""

    def set(self, slot: int, pairs: Sequence[AdapterPair | None]) -> None:
        """Give an adapter its pairs, one for each linear; None for one that it does not change.

        Raises `ValueError` for tensors of another shape or dtype.
        """
        column, parts = 0, []
        for size, pair in zip(self.sizes, pairs, strict=True):
            parts.append(_Part() if pair is None else self._part(pair, column, size))
            column += size
        self.pairs[slot] = list(pairs)
        for index, part in enumerate(parts):
            self._parts[slot * len(parts) + index] = part
        self._ranks[slot] = max((part.rank for part in parts), default=0)

    def add(self, x: Tensor, out: Tensor, plan: AdapterRows) -> None:
        """Add the adapters' products of x [R, in_features] to out [R, sum of sizes], in place.

        Rows of both may be apart in memory. Raises `ValueError` for unreadable tensors and rows beyond R.
        """
        max_rank = max(self._ranks)
        if not max_rank:
            return
        x = x if x.stride(-1) == 1 else x.contiguous()
        if len(plan.rows) and int(plan.rows.max()) >= len(x):
            raise argument_error("x", x, f"a tensor of more than {int(plan.rows.max())} rows")
        low = torch.empty(len(plan.rows) * len(self.sizes) * max_rank)
        table, rows = self.call, plan.call
        call = _Call(
            address("x", x, self.dtype, (len(x), self.in_features), strided_rows=True),
            address("out", out, self.dtype, (len(x), sum(self.sizes)), strided_rows=True),
            ctypes.addressof(table),
            ctypes.addressof(rows),
            low.data_ptr(),
            x.stride(0),
            out.stride(0),
            0,
            len(x),
            self.dtype == torch.bfloat16,
            self._num_threads(len(plan.rows)),
        )
        _library().adapters_run(ctypes.addressof(call))

    @property
    def call(self) -> "TableCall":
        """The table as kernels read it, good until an adapter is set; it keeps nothing alive."""
        max_rank = max(self._ranks)
        parts = ctypes.addressof(self._parts) if max_rank else None
        return TableCall(parts, len(self.sizes), max_rank, self.in_features, sum(self.sizes))

    def _num_threads(self, num_rows: int) -> int:
        products = num_rows * max(self._ranks) * (self.in_features * len(self.sizes) + sum(self.sizes))
        return max(1, min(torch.get_num_threads(), products // _PRODUCTS_A_THREAD))

    def _part(self, pair: AdapterPair, column: int, size: int) -> "_Part":
        rank = len(pair.a) * _LANES
        return _Part(
            address("a", pair.a, self.dtype, (rank // _LANES, self.in_features, _LANES)),
            address("b", pair.b, self.dtype, (-(-size // _PANEL), rank, _PANEL)),
            rank,
            column,
            size,
            pair.scale,
        )


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernel computes this dtype on this machine."""
    return dtype in DTYPES and build.load_kernels() is not None


class _Part(ctypes.Structure):
    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        *((name, c_int64) for name in ("rank", "column", "size")),
        ("scale", c_float),
    ]


class TableCall(ctypes.Structure):
    """An `AdapterTable` for the kernels; zeros if no adapter changes these linears."""

    _fields_ = [
        ("parts", c_void_p),
        *((name, c_int64) for name in ("num_parts", "max_rank", "in_features", "out_features")),
    ]


class RowsCall(ctypes.Structure):
    """`AdapterRows` for the kernels."""

    _fields_ = [
        *((name, c_void_p) for name in ("blocks", "rows")),
        *((name, c_int64) for name in ("num_blocks", "num_rows")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "table", "rows", "low")),
        *((name, c_int64) for name in ("x_stride", "out_stride", "begin", "end")),
        *((name, c_int32) for name in ("is_bf16", "num_threads")),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.declared(adapters_run=(None, c_void_p))
