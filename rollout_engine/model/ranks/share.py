"""How rows are divided among ranks."""

from typing import NamedTuple

_PANEL = 32
"""Rows that a packed product computes together; a cut between two such panels costs nothing."""


class Share(NamedTuple):
    """Rows [first, stop) of `whole`."""

    first: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.stop - self.first

    @property
    def rows(self) -> slice:
        """The rows as an index of a tensor that has all of them."""
        return slice(self.first, self.stop)

    @property
    def is_whole(self) -> bool:
        """Whether it is all rows."""
        return self.size == self.whole

    @classmethod
    def all(cls, whole: int) -> "Share":
        """All rows."""
        return cls(0, whole, whole)

    def times(self, unit: int) -> "Share":
        """The share of `whole * unit` rows, if each row becomes `unit` rows."""
        return Share(self.first * unit, self.stop * unit, self.whole * unit)


def share_of(whole: int, rank: int, num_ranks: int) -> Share:
    """The rows of `rank`: of all ranks together each row once, as evenly as whole panels allow.

    Raises `ValueError` if there are fewer rows than ranks.
    """
    if whole < num_ranks:
        raise ValueError(f"{whole} rows cannot be divided among {num_ranks} ranks")
    unit = _PANEL if whole >= _PANEL * num_ranks else 1
    units = -(-whole // unit)
    first, stop = (units * index // num_ranks * unit for index in (rank, rank + 1))
    return Share(first, min(stop, whole), whole)
