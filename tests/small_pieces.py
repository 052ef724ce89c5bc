"""Digests of pieces of 64 bytes instead of 512 KiB, in this process: tiny tensors then have many."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SMALL_PIECE_BYTES = 64
_USERS = ("digests", "lazy_tensor", "manifest", "pieces", "tensor_check", "tensor_writer")


@contextmanager
def small_pieces() -> Iterator[int]:
    """Inside, senders and receivers of this process digest such pieces; yields their bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _USERS:
            patch.setattr(f"sync.{module}.PIECE_BYTES", SMALL_PIECE_BYTES)
        yield SMALL_PIECE_BYTES
