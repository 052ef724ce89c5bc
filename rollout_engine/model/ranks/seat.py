"""One rank's place among the ranks of an engine, and how rank 0 makes the others compute what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.ranks.exchange import Exchange

ELSEWHERE = "so they do on another rank"
"""Why layers run as modules on a rank that has no reason of its own."""


class Columns(Protocol):
    """The chunks of a step as arrays, as `kernels.cpu.attention.ChunkColumns`."""

    @property
    def first_positions(self) -> np.ndarray: ...
    @property
    def token_starts(self) -> np.ndarray: ...
    @property
    def blocks(self) -> np.ndarray: ...
    @property
    def block_starts(self) -> np.ndarray: ...


class Followers(Protocol):
    """The ranks from 1 on, as rank 0 sees them. Each call returns at once; they meet rank 0 in what it computes."""

    def forward(
        self, token_ids: np.ndarray, columns: Columns, logit_rows: np.ndarray, adapter_rows: AdapterRows | None
    ) -> None:
        """Compute these chunks, int64 [T], over the KV pool, and logits of these rows."""

    def forward_dense(self, input_ids: Tensor, adapter_rows: AdapterRows | None, experts: Tensor | None) -> None:
        """Compute whole sequences, int64 [B, T], without the KV pool; `experts`: see `CpuModel.replaying`."""

    def head(self, states: Tensor) -> None:
        """Compute logits of hidden states."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks of the KV pool, (source, destination)."""


class Seat:
    """A rank, and its end of what the ranks exchange. `followers`: those of rank 0; None of others.

    `splits_sums`: products may be cut by their inputs, so that bits depend on the number of ranks.
    While an engine loads, all ranks run the same code and meet in it. Then rank 0 serves: what it computes `together`
    the others are told of first.
    """

    def __init__(self, exchange: Exchange, followers: Followers | None = None, *, splits_sums: bool = False) -> None:
        self.exchange, self.followers, self.splits_sums = exchange, followers, splits_sums
        self.rank, self.num_ranks = exchange.rank, exchange.num_ranks
        self._serves = self._is_together = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Seat":
        """Copies of a module are of the same rank."""
        return self

    def all_agree(self, condition: bool) -> bool:
        """Whether `condition` holds on every rank. All call this together."""
        return all(self.exchange.agree(condition))

    def serve(self) -> None:
        """From now on tell the followers what to compute."""
        self._serves = True

    @property
    def alone(self) -> "Followers | None":
        """The followers, if they must be told of what is computed now; None where they compute it anyway."""
        return self.followers if self._serves and not self._is_together else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, the followers compute what they have just been told. If it raises, they cannot go on."""
        assert not self._is_together, "the followers compute one thing at a time"
        self._is_together = True
        try:
            yield
        except BaseException:
            self.exchange.break_()
            raise
        finally:
            self._is_together = False


def described_ranks(num_ranks: int) -> str:
    """The number of ranks, for the start-up line; "": one."""
    return f", {num_ranks} ranks" if num_ranks > 1 else ""
