"""Values of different lengths for some sequences of a step, end to end in few arrays, as messages carry them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import ClassVar, Self

import msgspec
import numpy as np

_PIECE_VALUES = 1 << 22
"""Values in 16 MiB, well below the longest frame that a wire takes."""


class SequenceRows(msgspec.Struct):
    """One row of values for each of some sequences, in place of the one token that each gained."""

    least_width: ClassVar[int] = 0
    """Fewest values of a sequence."""
    sequence_ids: list[int]
    widths: list[int]
    """Number of values of each sequence."""
    pieces: list[np.ndarray]
    """All sequences end to end, each whole in one piece."""

    def __post_init__(self) -> None:
        ends, piece_ends = (set(accumulate(sizes)) for sizes in (self.widths, map(len, self.pieces)))
        fits = max(ends, default=0) == max(piece_ends, default=0) and piece_ends <= ends | {0}
        if (
            not fits
            or len(self.sequence_ids) != len(self.widths)
            or min(self.widths, default=self.least_width) < self.least_width
        ):
            raise ValueError(f"{type(self).__name__}: sequence_ids, widths and pieces do not fit each other")

    @classmethod
    def of(cls, rows: Mapping[int, np.ndarray]) -> "Self | None":
        """Pack a map of sequence id -> values [width]; None if it is empty."""
        if not rows:
            return None
        pieces: list[list[np.ndarray]] = [[]]
        size = 0
        for row in rows.values():
            if size and size + len(row) > _PIECE_VALUES:
                pieces.append([])
                size = 0
            pieces[-1].append(row)
            size += len(row)
        return cls(list(rows), [len(row) for row in rows.values()], [np.concatenate(piece) for piece in pieces])

    def rows(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (sequence id, values [width])."""
        pieces = iter(self.pieces)
        piece = nothing = self.pieces[0][:0] if self.pieces else np.empty(0, np.float32)
        for sequence, width in zip(self.sequence_ids, self.widths, strict=True):
            while width and not len(piece):
                piece = next(pieces)
            row, piece = (piece[:width], piece[width:]) if width else (nothing, piece)
            yield sequence, row

    def keep(self, sequence_ids: Iterable[int]) -> "Self | None":
        """The rows of these sequences, as far as they have any; None if they have none."""
        values_of = dict(self.rows())
        return self.of({id: values_of[id] for id in sequence_ids if id in values_of})

    def offset_ids(self, first: int) -> "Self":
        """The same rows with `first` taken from every sequence id."""
        return type(self)([id - first for id in self.sequence_ids], self.widths, self.pieces)


class IdLogprobs(SequenceRows):
    """float32 log-probs of the token ids that some sequences asked for."""

    least_width = 1


class SupportIds(SequenceRows):
    """int32 ids, ascending, that the draws of some sequences had left; none stands for the whole vocabulary."""
