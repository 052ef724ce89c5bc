"""Low-rank adapters (LoRA, Hu et al. 2021) added to products, each row under its own adapter, or none.

    out[row] += scale * (x[row] @ A.T) @ B.T

    rows of one adapter, 16 at a time ── low = x @ A.T, float32 ── out + scale * low @ B.T, rounded once

Sums are float32 and in one order for every row, so a row's bits do not depend on the batch. Which matrices a slot has
the kernels read from a table on the device: adapters are added and removed without another launch.
Twin: `kernels.adapters`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.cpu.adapters import AdapterRows
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.rounding import INTERPRETED, narrow

BLOCK_ROWS = 16
"""Rows of one adapter that are computed together."""
_RANKS = 16
"""Columns of A.T computed together; ranks are padded to a multiple."""
_BLOCK_K = {torch.float32: 32}
_DEFAULT_BLOCK_K = 64
_BLOCK_N = 64
_FIELDS = 4
"""Numbers of a pair in the table: addresses of A and B, rank, bits of the scale."""


class AdapterPair(NamedTuple):
    """One adapter's matrices for one linear layer, its rank padded with zeros to a multiple of 16."""

    a: Tensor
    """[rank, in_features]."""
    b: Tensor
    """[out_features, rank]."""
    scale: float

    @classmethod
    def packed(cls, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> "AdapterPair":
        """Pack A [rank, in_features] and B [out_features, rank], rounded to `dtype`, on their device."""
        missing = -len(a) % _RANKS
        wide, tall = a.detach().to(dtype), b.detach().to(dtype)
        pad = torch.nn.functional.pad
        return cls(pad(wide, (0, 0, 0, missing)).contiguous(), pad(tall, (0, missing)).contiguous(), scale)

    def to(self, device: torch.device) -> "AdapterPair":
        """The same on a device."""
        return AdapterPair(self.a.to(device), self.b.to(device), self.scale)


class AdapterBatch(NamedTuple):
    """`AdapterRows` in blocks of `BLOCK_ROWS`, on the device."""

    rows: Tensor
    """int32 [N]."""
    blocks: Tensor
    """int32 [B, 3]: (first, count, slot)."""

    @classmethod
    def of(cls, plan: AdapterRows, device: torch.device) -> "AdapterBatch":
        """Copy a plan, whose blocks have at most `BLOCK_ROWS` rows, to a device."""
        return cls(torch.from_numpy(plan.rows).to(device), torch.from_numpy(plan.blocks).to(device))


class AdapterTable:
    """The pairs of `num_slots` adapters for linears that share an input and write side by side into one output.

    `sizes`: out_features of these linears. It keeps the tensors that it points to.
    """

    def __init__(
        self, num_slots: int, in_features: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_features, self.sizes, self.dtype = in_features, list(sizes), dtype
        self.pairs: list[list[AdapterPair | None]] = [[None] * len(self.sizes) for _ in range(num_slots)]
        self._host = torch.zeros(num_slots, len(self.sizes), _FIELDS, dtype=torch.int64)
        self._table = self._host.to(device)
        ends = np.cumsum([0, *self.sizes])
        self._columns = torch.from_numpy(np.stack([ends[:-1], self.sizes], 1).astype(np.int32)).to(device)
        self.max_rank = 0
        """The highest rank of its adapters, padded."""

    def set(self, slot: int, pairs: Sequence[AdapterPair | None]) -> None:
        """Give an adapter its pairs, on the device, one for each linear; None for one that it does not change.

        Products launched before, on the current stream, are made with the former ones. Raises `ValueError` for tensors
        of another shape or dtype.
        """
        for part, (size, pair) in enumerate(zip(self.sizes, pairs, strict=True)):
            fields = self._host[slot, part]
            fields.zero_()
            if pair is not None:
                self._check(pair, size)
                self._keep_for_launched(pair)
                fields[:3] = torch.tensor([pair.a.data_ptr(), pair.b.data_ptr(), len(pair.a)])
                fields[3] = int(np.float32(pair.scale).view(np.int32))
        self.pairs[slot] = list(pairs)
        self.max_rank = int(self._host[:, :, 2].max())
        told = self._host.pin_memory() if self._table.device.type == "cuda" else self._host
        self._table.copy_(told, non_blocking=True)  # torch keeps pinned memory until it has been read

    def add(self, x: Tensor, out: Tensor, plan: AdapterBatch) -> None:
        """Add the adapters' products of x [R, in_features] to out [R, sum of sizes], in place.

        Both have the table's dtype; rows of each may be apart in memory.
        """
        if not self.max_rank or not len(plan.blocks):
            return
        if not x.stride(1) == out.stride(1) == 1:
            raise ValueError(f"Rows should be contiguous, got strides {x.stride()} and {out.stride()}.")
        if not x.dtype == out.dtype == self.dtype:
            raise ValueError(f"Dtypes should be {self.dtype}, got {x.dtype} and {out.dtype}.")
        num_parts, ranks = len(self.sizes), self.max_rank
        low = torch.empty(len(plan.rows) * num_parts * ranks, dtype=torch.float32, device=x.device)
        block_k = _BLOCK_K.get(x.dtype, _DEFAULT_BLOCK_K)
        _shrink.launch(
            (len(plan.blocks), num_parts, ranks // _RANKS),
            (x, plan.rows, plan.blocks, self._table, low),
            (),
            (
                *(x.stride(0), self.in_features, ranks, self.in_features % block_k == 0),
                *(num_parts, _FIELDS, BLOCK_ROWS, _RANKS, block_k),
            ),
            num_warps=4,
        )
        _expand.launch(
            (len(plan.blocks), num_parts, triton.cdiv(max(self.sizes), _BLOCK_N)),
            (out, plan.rows, plan.blocks, self._table, self._columns, low),
            (),
            (out.stride(0), ranks, num_parts, _FIELDS, BLOCK_ROWS, _RANKS, _BLOCK_N),
            num_warps=4,
        )

    def _keep_for_launched(self, pair: AdapterPair) -> None:
        """Reuse the pair's memory, once released, only after all work launched by then has run: kernels have
        only addresses."""
        for tensor in pair[:2]:
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _check(self, pair: AdapterPair, size: int) -> None:
        rank = len(pair.a)
        shapes = (rank, self.in_features), (size, rank)
        for name, tensor, shape in zip(("a", "b"), pair[:2], shapes, strict=True):
            is_right = tensor.shape == shape and tensor.dtype == self.dtype and tensor.is_contiguous()
            if not is_right or tensor.device != self._table.device or rank % _RANKS:
                raise ValueError(
                    f"{name} should be {self.dtype} {list(shape)} on {self._table.device}, contiguous, its rank a "
                    f"multiple of {_RANKS}; got {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
                )


@triton.jit
def _shrink_kernel(
    x_ptr,
    rows_ptr,
    blocks_ptr,
    table_ptr,
    low_ptr,
    x_stride,
    in_features,
    max_rank,
    IS_EVEN: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """low[entry, part, :] = x[row] @ A.T, 16 columns a program."""
    first, count, pair = _pair_of(blocks_ptr, table_ptr, NUM_PARTS, FIELDS)
    rank, column = tl.load(pair + 2), tl.program_id(2) * RANKS
    if (column < rank) & (count > 0):
        entry, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        # Past the end the last row is read again and not written, so loads need no mask.
        row = tl.load(rows_ptr + first + tl.minimum(entry, count - 1)).to(tl.int64)
        a_ptr = tl.multiple_of(tl.load(pair).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
        x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
        a_ptrs = a_ptr + (column + tl.arange(0, RANKS)).to(tl.int64)[None, :] * in_features + k[:, None]
        total = tl.zeros((BLOCK_M, RANKS), tl.float32)
        for start in range(0, in_features, BLOCK_K):
            if IS_EVEN:
                x, a = tl.load(x_ptrs), tl.load(a_ptrs)
            else:
                inside = k < in_features - start
                x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
                a = tl.load(a_ptrs, mask=inside[:, None], other=0.0)
            if INTERPRETED:
                x, a = x.to(tl.float32), a.to(tl.float32)
            total = tl.dot(x, a, total, input_precision="ieee")
            x_ptrs += BLOCK_K
            a_ptrs += BLOCK_K
        place = ((first + entry).to(tl.int64) * NUM_PARTS + tl.program_id(1)) * max_rank + column
        low_ptrs = low_ptr + place[:, None] + tl.arange(0, RANKS)[None, :]
        tl.store(low_ptrs, total, mask=(entry < count)[:, None])


@triton.jit
def _expand_kernel(
    out_ptr,
    rows_ptr,
    blocks_ptr,
    table_ptr,
    columns_ptr,
    low_ptr,
    out_stride,
    max_rank,
    NUM_PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[row, columns of the part] += scale * low[entry, part] @ B.T."""
    first, count, pair = _pair_of(blocks_ptr, table_ptr, NUM_PARTS, FIELDS)
    part = tl.program_id(1)
    left, size = tl.load(columns_ptr + part * 2), tl.load(columns_ptr + part * 2 + 1)
    rank, start = tl.load(pair + 2), tl.program_id(2) * BLOCK_N
    if (start < size) & (rank > 0) & (count > 0):
        entry, r, column = tl.arange(0, BLOCK_M), tl.arange(0, RANKS), start + tl.arange(0, BLOCK_N)
        b_ptr = tl.multiple_of(tl.load(pair + 1).to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
        inside, is_row = column < size, entry < count
        low_ptrs = low_ptr + ((first + entry).to(tl.int64) * NUM_PARTS + part)[:, None] * max_rank + r[None, :]
        b_ptrs = b_ptr + tl.minimum(column, size - 1).to(tl.int64)[None, :] * rank + r[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for _ in range(0, rank, RANKS):
            low = tl.load(low_ptrs, mask=is_row[:, None], other=0.0)
            total = tl.dot(low, tl.load(b_ptrs).to(tl.float32), total, input_precision="ieee")
            low_ptrs += RANKS
            b_ptrs += RANKS
        scale = tl.load(pair + 3).to(tl.int32).to(tl.float32, bitcast=True)
        row = tl.load(rows_ptr + first + tl.minimum(entry, count - 1)).to(tl.int64)
        out_ptrs = out_ptr + row[:, None] * out_stride + (left + column)[None, :]
        mask = is_row[:, None] & inside[None, :]
        before = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, narrow(before + total * scale, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pair_of(blocks_ptr, table_ptr, NUM_PARTS: tl.constexpr, FIELDS: tl.constexpr):
    """First entry and number of rows of this program's block, and address of the pair of its adapter and part."""
    block = blocks_ptr + tl.program_id(0).to(tl.int64) * 3
    slot = tl.load(block + 2).to(tl.int64)
    return tl.load(block), tl.load(block + 1), table_ptr + (slot * NUM_PARTS + tl.program_id(1)) * FIELDS


_shrink, _expand = Launcher(_shrink_kernel), Launcher(_expand_kernel)


def added(x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """out [R, N] + scale * x [R, K] @ a.T @ b.T as a new tensor, with the bits of `AdapterTable.add`."""
    table = AdapterTable(1, x.shape[1], [len(b)], x.dtype, x.device)
    table.set(0, [AdapterPair.packed(a, b, scale, x.dtype)])
    result = out.detach().clone(memory_format=torch.contiguous_format)
    if plan := AdapterRows.of([0], [len(x)], BLOCK_ROWS):
        table.add(x.detach().contiguous(), result, AdapterBatch.of(plan, x.device))
    return result
