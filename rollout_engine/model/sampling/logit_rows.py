"""Logits of a step's rows, all at once if they are few, else a bounded piece at a time.

    hidden [R, H] ── head ──> logits [n, V] of n <= R rows ── draw ──> n tokens

Samples of one prompt draw from one row, so 16 prompts of 4,096 samples are 65,536 draws from 16 rows of logits: a draw
gets its rows a piece at a time, too. No row's bits depend on the piece it is in: in a deterministic head and in every
draw they do not depend on the other rows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import torch
from torch import Tensor

_PIECE_NUMEL = 1 << 26
"""Logits that a step holds at a time: 128 MiB as bfloat16."""
_DEVICE_PIECE_NUMEL = 1 << 28
"""Larger on devices, because a launch costs more."""


_ALIGNED_ROWS = 16
"""A slice of a column or of logits that begins at a multiple of these rows begins at one of 16 bytes."""


def max_rows(vocab_size: int, device: torch.device) -> int:
    """The most rows of logits in a piece."""
    if device.type == "cpu":
        return max(1, _PIECE_NUMEL // vocab_size)
    return aligned_rows(_DEVICE_PIECE_NUMEL // vocab_size)


def aligned_rows(count: int) -> int:
    """Round `count`, at least 1, down so that no piece begins at an address for which kernels are compiled
    anew; too few rows stay as they are."""
    return max(1, count - count % _ALIGNED_ROWS if count > _ALIGNED_ROWS else count)


def row_pieces(count: int, vocab_size: int, device: torch.device) -> list[slice]:
    """Divide `count` rows into pieces of at most `max_rows`; one if they fit, or if there are none."""
    size = max_rows(vocab_size, device)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)] or [slice(0, 0)]


class LogitRows:
    """Logits of R rows; `take` computes those that have not been."""

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """`head` turns `hidden` [R, H] into logits, at once if they fit in a piece."""
        self._hidden, self._head = hidden, head
        self._logits = head(hidden) if len(hidden) <= max_rows(vocab_size, hidden.device) else None
        self._places: Tensor | None = None
        self.around: Callable[[Sequence[int] | Tensor], AbstractContextManager[object]] = nullcontext
        """Makes the context in which rows that have been left are computed, from their indices."""

    @classmethod
    def of(cls, logits: Tensor) -> "LogitRows":
        """Rows whose logits have been computed."""
        made = cls.__new__(cls)
        made._logits, made._places = logits, None
        return made

    @property
    def are_left(self) -> bool:
        """Whether no logits have been computed."""
        return self._logits is None

    def at(self, places: Tensor) -> "LogitRows":
        """N rows of which row i is row `places[i]` of these, int64 [N]; one may stand at several places."""
        made = copy(self)
        made._places = places
        return made

    def take(self, rows: slice | Tensor) -> Tensor:
        """Logits [n, V] of these rows: a slice, or int64 [n], in which a row may stand several times."""
        if self._places is not None:
            rows = self._places[rows]
        return self.compute(rows) if self._logits is None else self._logits[rows]

    @torch.inference_mode()
    def compute(self, rows: slice | Tensor) -> Tensor:
        """Compute the logits [n, V] of these rows, which have been left."""
        if isinstance(rows, slice):
            with self.around(range(*rows.indices(len(self._hidden)))):
                return self._head(self._hidden[rows])
        distinct, places = torch.unique(rows, return_inverse=True)
        with self.around(distinct):
            return self._head(self._hidden[distinct])[places]
