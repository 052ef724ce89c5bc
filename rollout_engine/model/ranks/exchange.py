"""Exchanges between the ranks of an engine: numbers and barriers of their hosts, and the tensors that they compute."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rollout_engine.model.ranks.share import Share

WINDOW_BYTES = 8 << 20


class Meeting(ABC):
    """One rank's end of the exchange between hosts. Once it is broken, its waits raise `BrokenTurnsError`."""

    window: Tensor
    """uint8 [WINDOW_BYTES], through which pieces of weights pass."""
    window_is_shared: bool
    """Whether all ranks see the same window."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> "Meeting":
        """Copies of a module exchange with the same ranks."""
        return self

    @abstractmethod
    def meet(self) -> None:
        """Return once all ranks have called it."""

    @abstractmethod
    def agree(self, number: int) -> list[int]:
        """The numbers that all ranks give, by rank."""

    @abstractmethod
    def break_(self) -> None:
        """Let no rank wait for another any more, now and later."""


class Exchange(Meeting):
    """One rank's end of all that ranks exchange. Every rank calls the same methods in the same order."""

    @abstractmethod
    def gathering(self, share: Share) -> Callable[[Tensor], Tensor]:
        """A function: this rank's columns [..., size] of a `share` -> the whole [..., whole].

        All ranks call `gathering` together.
        """

    @abstractmethod
    def gather_rows(self, part: Tensor, first: int, num_rows: int) -> Tensor:
        """The whole [num_rows, H] of which every rank gives its rows [n, H], from row `first` on."""

    @abstractmethod
    def merge_rows(self, rows: Tensor, own: Tensor) -> Tensor:
        """The tensor [T, H] of which each rank has computed the `rows` [T, H] for which `own`, bool [T], is true.

        Every row is some rank's.
        """

    @abstractmethod
    def add_up(self, part: Tensor) -> Tensor:
        """The sum of the tensors of one shape that all ranks give, the same on all. `part` may be overwritten."""
