"""The digest of a tensor: xxh3-128 of the xxh3-128 digests of its pieces, one after the other.

    bytes    [ 512 KiB | 512 KiB | 512 KiB | rest ]        row-major; strides do not matter
    pieces      16        16        16       16            bytes each, as xxh3-128 is written: the high half first
    digest   xxh3-128 of those bytes, in hexadecimal       of nothing, if there is no piece

The hash of a piece is one long chain of operations, but pieces are independent: a device hashes many at the same time,
and the host hashes each as it arrives.
"""

import ctypes
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import xxhash
from torch import Tensor

PIECE_BYTES = 512 << 10
"""Bytes of every piece but the last. A piece stays in a core's L2 cache between its digest and its copy; smaller pieces
would cost more calls. A small model has thousands, which a device hashes at once."""
DIGEST_FORM = f"xxh3-128 of pieces of {PIECE_BYTES} bytes"
"""How digests are made, as a manifest states it."""

Memory: TypeAlias = memoryview | bytes


class Digest:
    """The digest of bytes that are given in order, in parts of any size."""

    def __init__(self) -> None:
        self._piece, self._room = xxhash.xxh3_128(), PIECE_BYTES
        self.pieces: list[bytes] = []
        """Digests of the pieces that are complete."""

    def update(self, memory: Memory) -> None:
        """Add the next bytes."""
        start = 0
        while start < len(memory):
            part = memory[start : start + self._room]
            self._piece.update(part)
            start, self._room = start + len(part), self._room - len(part)
            if self._room == 0:
                self._end_piece()

    def hexdigest(self) -> str:
        """The digest of all bytes; `update` must not be called again."""
        if self._room < PIECE_BYTES:
            self._end_piece()
        return digest_of(self.pieces)

    def _end_piece(self) -> None:
        self.pieces.append(self._piece.digest())
        self._piece.reset()
        self._room = PIECE_BYTES


def digest_of(pieces: Iterable[bytes]) -> str:
    """The digest of bytes whose pieces have these digests."""
    return xxhash.xxh3_128_hexdigest(b"".join(pieces))


def piece_digests(tensor: Tensor) -> list[bytes]:
    """The digests of a tensor's pieces, computed on the host."""
    memory = tensor_bytes(tensor.detach().cpu().contiguous())
    return [xxhash.xxh3_128_digest(memory[i : i + PIECE_BYTES]) for i in range(0, len(memory), PIECE_BYTES)]


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor, computed on the host."""
    return digest_of(piece_digests(tensor))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; it keeps the tensor alive.

    It does not use `Tensor.numpy`, after which a storage cannot be resized, as sleeping engines and FSDP do.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory).data
