"""The digest of a tensor: xxh3-128 of the xxh3-128 digests of its pieces, one after the other.

    bytes    [ 512 KiB | 512 KiB | 512 KiB | rest ]        row-major; strides do not matter
    pieces      16        16        16       16            bytes each, as xxh3-128 is written: the high half first
    digest   xxh3-128 of those bytes, in hexadecimal       of nothing, where there is no piece

The hash of a piece is one long chain. Many pieces can be hashed at the same time, as a device would have it, and each
when it comes.
"""

import ctypes
from typing import TypeAlias

import numpy as np
import xxhash
from torch import Tensor

PIECE_BYTES = 512 << 10
"""Of every piece but the last. It stays in a core's second cache between its digest and what else is done with it; less
costs more calls. A small model has thousands for a device to hash at once."""
DIGEST_FORM = f"xxh3-128 of pieces of {PIECE_BYTES} bytes"
"""What a manifest says of its digests."""

Memory: TypeAlias = memoryview | bytes


class Digest:
    """Of bytes that come in order, in parts of any size."""

    def __init__(self) -> None:
        self._pieces, self._piece, self._room = xxhash.xxh3_128(), xxhash.xxh3_128(), PIECE_BYTES

    def update(self, memory: Memory) -> None:
        """`memory` follows."""
        start = 0
        while start < len(memory):
            part = memory[start : start + self._room]
            self._piece.update(part)
            start, self._room = start + len(part), self._room - len(part)
            if self._room == 0:
                self._end_piece()

    def hexdigest(self) -> str:
        """Of all; nothing may follow."""
        if self._room < PIECE_BYTES:
            self._end_piece()
        return self._pieces.hexdigest()

    def _end_piece(self) -> None:
        self._pieces.update(self._piece.digest())
        self._piece.reset()
        self._room = PIECE_BYTES


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor, computed on the host."""
    digest = Digest()
    digest.update(tensor_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; it keeps the tensor alive.

    Not by `Tensor.numpy`, after which a storage can never be resized, as sleeping engines and FSDP do.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory).data
