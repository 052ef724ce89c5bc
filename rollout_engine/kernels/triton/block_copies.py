"""Copies of whole KV blocks in all layers by one launch. Twin: `pool[destinations] = pool[sources]`, layer by layer.

program     (pair, tensor, 16 KiB of a block)
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Words per program: 16 KiB of 8-byte words."""
_ALIGNMENT = 16
_WORDS = {8: tl.int64, 1: tl.int8}


class BlockCopies:
    """Copies blocks of `tensors`, contiguous, [num_blocks, ...] each; their addresses must not change.

    The table of addresses is put on the device once, at construction, which waits for nothing.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        rows = np.array([(tensor.data_ptr(), tensor[0].nbytes) for tensor in tensors], np.int64)
        table, device = torch.from_numpy(rows), tensors[0].device
        self._table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        self._width = 1 if (rows % _ALIGNMENT).any() else 8
        self._num_pieces = triton.cdiv(int(rows[:, 1].max()), self._width * _BLOCK)

    def run(self, pairs: Tensor) -> None:
        """Copy blocks (source, destination), int64 [N, 2] on the device, on the current stream.

        No destination may be another pair's source or destination.
        """
        _block_copy_kernel[(len(pairs), len(self._table), self._num_pieces)](
            self._table, pairs, WORD=_WORDS[self._width], WIDTH=self._width, BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _block_copy_kernel(table_ptr, pairs_ptr, WORD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pair = pairs_ptr + tl.program_id(0).to(tl.int64) * 2
    row = table_ptr + tl.program_id(1).to(tl.int64) * 2
    base, size = tl.load(row), tl.load(row + 1)
    source = (base + tl.load(pair) * size).to(tl.pointer_type(WORD))
    target = (base + tl.load(pair + 1) * size).to(tl.pointer_type(WORD))
    num_words = size // WIDTH
    if WIDTH > 1:  # sizes and addresses are multiples of 16 bytes
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        num_words = tl.multiple_of(num_words, 2)
    word = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)
