"""Copies of many tensors in one launch, to commit staged weights. Twin: `torch._foreach_copy_`."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Words per program: 32 KiB of 8-byte words, 16 bytes per thread and load."""
_ALIGNMENT = 16
_WORDS = {8: tl.int64, 1: tl.int8}


class FusedCopy:
    """Copies every source into its destination; the table of addresses is put on the device once, at construction.

    It keeps the tensors alive; their addresses must not change. Pairs are contiguous, of equal shape and dtype, on one
    device; neither destinations nor a destination and a source may overlap.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`pairs` of (source, destination). Raises `ValueError` if two do not match."""
        for source, destination in pairs:
            _check(source, destination)
        self._pairs = [pair for pair in pairs if pair[0].numel()]
        aligned = [pair for pair in self._pairs if _is_aligned(*pair)]
        rest = [pair for pair in self._pairs if not _is_aligned(*pair)]
        self._parts = [_Part(part, width) for part, width in ((aligned, 8), (rest, 1)) if part]

    @property
    def num_bytes(self) -> int:
        """Bytes copied by every run."""
        return sum(source.nbytes for source, _ in self._pairs)

    def run(self) -> None:
        """Copy on the current stream, without synchronising."""
        for part in self._parts:
            part.run()


class _Part:
    """Pairs copied by one launch, in words of `width` bytes."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], width: int) -> None:
        sizes = np.array([source.nbytes for source, _ in pairs], np.int64)
        num_blocks = -(-sizes // (width * _BLOCK))
        first_blocks = np.cumsum(num_blocks) - num_blocks
        columns = [[source.data_ptr() for source, _ in pairs], [target.data_ptr() for _, target in pairs], sizes]
        device = pairs[0][0].device
        self._table = torch.from_numpy(np.stack([*np.array(columns, np.int64), first_blocks], axis=1)).to(device)
        self._pair_of_block = torch.from_numpy(np.repeat(np.arange(len(pairs), dtype=np.int32), num_blocks)).to(device)
        self._width = width

    def run(self) -> None:
        _copy_kernel[(len(self._pair_of_block),)](
            self._table, self._pair_of_block, WORD=_WORDS[self._width], WIDTH=self._width, BLOCK=_BLOCK, num_warps=8
        )


def _check(source: Tensor, destination: Tensor) -> None:
    if source.shape != destination.shape or source.dtype != destination.dtype or source.device != destination.device:
        raise ValueError(
            f"A source should be {destination.dtype} {list(destination.shape)} on {destination.device} like its "
            f"destination, and is {source.dtype} {list(source.shape)} on {source.device}."
        )
    if not (source.is_contiguous() and destination.is_contiguous()):
        raise ValueError(
            f"Sources and destinations should be contiguous, got strides {source.stride()}, {destination.stride()}."
        )


def _is_aligned(source: Tensor, destination: Tensor) -> bool:
    return (source.data_ptr() | destination.data_ptr()) % _ALIGNMENT == 0


@triton.jit
def _copy_kernel(table_ptr, pair_of_block_ptr, WORD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    row = table_ptr + tl.load(pair_of_block_ptr + block).to(tl.int64) * 4
    source, target, size, first_block = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    start = (block - first_block) * BLOCK
    word = start + tl.arange(0, BLOCK)
    source_words = source.to(tl.pointer_type(WORD))
    target_words = target.to(tl.pointer_type(WORD))
    if WIDTH > 1:
        source_words, target_words = tl.multiple_of(source_words, 16), tl.multiple_of(target_words, 16)
    num_words = size // WIDTH
    if start + BLOCK <= num_words:
        tl.store(target_words + word, tl.load(source_words + word))
    else:
        inside = word < num_words
        tl.store(target_words + word, tl.load(source_words + word, mask=inside), mask=inside)
        if WIDTH > 1:
            byte = num_words * WIDTH + tl.arange(0, WIDTH)
            tail = tl.load(source.to(tl.pointer_type(tl.int8)) + byte, mask=byte < size)
            tl.store(target.to(tl.pointer_type(tl.int8)) + byte, tail, mask=byte < size)
