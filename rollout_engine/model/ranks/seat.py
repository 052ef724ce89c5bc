"""One rank's place among the ranks of an engine, and how rank 0 makes the others compute the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import msgspec
import numpy as np
from torch import Tensor

from rollout_engine.base.messages import SchedulerOutput
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.model.ranks.exchange import Exchange, Meeting
from rollout_engine.model.ranks.pipe import Pipe

ELSEWHERE = "so they do on another rank"
"""Why layers run as modules on a rank that has no reason of its own."""


class Followers(Protocol):
    """The ranks from 1 on, as rank 0 sees them. Each call returns at once; they meet rank 0 in their exchanges."""

    def step(self, work: SchedulerOutput, token_ids: np.ndarray) -> None:
        """Run a step up to its logits; `token_ids`: those of its flat batch, int64 [T], as rank 0's runner has them.

        Ranks of earlier stages have been sent it before (`execution.step_feed`).
        """

    def take_logits(self, rows: list[int]) -> None:
        """Compute these rows of the last step's logits."""

    def begin_score(self, arguments: Sequence[Any]) -> int:
        """Begin a score with these arguments of `Backend.score`, in order. Returns its number."""
        ...

    def score_piece(self, number: int) -> None:
        """Compute the next piece of a score."""

    def end_score(self, number: int) -> None:
        """Forget a score."""


class Seat:
    """A rank, and its end of the exchange between ranks. `followers`: those of rank 0; None of others.

    `splits_sums`: products may be cut by their inputs, so that bits depend on the number of ranks.
    While an engine loads, all ranks run the same code and meet in it. Then rank 0 serves: it sends each step and each
    piece of a score to the others before it computes them, and they run the same code as well.

    With several stages `exchange`, `rank` and `num_ranks` are of the ranks of one stage, `team` the meeting of all
    ranks, and `pipe` this stage's place among the others.
    """

    def __init__(
        self,
        exchange: Exchange,
        followers: Followers | None = None,
        *,
        splits_sums: bool = False,
        team: Meeting | None = None,
        pipe: Pipe | None = None,
    ) -> None:
        self.exchange, self.followers, self.splits_sums = exchange, followers, splits_sums
        self.rank, self.num_ranks = exchange.rank, exchange.num_ranks
        self.team, self.pipe = team or exchange, pipe
        self._serves = self._is_together = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Seat":
        """Copies of a module are of the same rank."""
        return self

    def all_agree(self, condition: bool) -> bool:
        """Whether `condition` holds on every rank. All call this together."""
        return all(self.exchange.agree(condition))

    def serve(self) -> None:
        """From now on send the followers each step and score, and take part in the pipe, if there is one."""
        self._serves = True
        if self.pipe is not None:
            self.pipe.serve()

    def break_(self) -> None:
        """Let no rank wait for another any more, now and later."""
        self.team.break_()
        if self.pipe is not None:
            self.pipe.break_()

    @contextmanager
    def lead(self, announce: Callable[[Followers], object]) -> Iterator[None]:
        """Inside, the followers compute the steps that `announce` sends, once rank 0 serves. If it raises, they end."""
        if self.followers is None or not self._serves:
            yield
            return
        assert not self._is_together, "the followers compute one thing at a time"
        self._is_together = True
        try:
            announce(self.followers)
            yield
        except BaseException:
            self.break_()
            raise
        finally:
            self._is_together = False

    def lead_logits(self, rows: Sequence[int] | Tensor) -> AbstractContextManager[None]:
        """Inside, the followers compute these rows of the last step's logits."""
        return self.lead(
            lambda followers: followers.take_logits(rows.tolist() if isinstance(rows, Tensor) else list(rows))
        )


def preparing(seat: Seat | None, work: SchedulerOutput) -> AbstractContextManager[None]:
    """Inside, rank 0 prepares a step. If that fails, the followers still note the sequences that it ends and begins."""
    return nullcontext() if seat is None else _preparing(seat, work)


@contextmanager
def _preparing(seat: Seat, work: SchedulerOutput) -> Iterator[None]:
    try:
        yield
    except BaseException:
        changes = msgspec.structs.replace(work, scheduled=[], samples=[], block_copies=[])
        with lead(seat, lambda followers: followers.step(changes, np.empty(0, np.int64))):
            pass
        raise


def lead(seat: Seat | None, announce: Callable[[Followers], object]) -> AbstractContextManager[None]:
    """`Seat.lead` of a rank; nothing for a model that is not cut."""
    return nullcontext() if seat is None else seat.lead(announce)


def score_together(
    seat: Seat | None,
    score: Callable[..., Iterator[dict[int, TokenScores]]],
    *arguments: Any,
) -> Iterator[dict[int, TokenScores]]:
    """Yield the pieces of `score(*arguments)`, each of which all ranks compute together."""
    pieces = score(*arguments)
    if seat is None or seat.followers is None:
        yield from pieces
        return
    number = seat.followers.begin_score(arguments)
    try:
        while True:
            with seat.lead(lambda followers: followers.score_piece(number)):
                found = next(pieces, None)
            if found is None:
                return
            yield found
    finally:
        seat.followers.end_score(number)


def described_ranks(num_ranks: int, num_stages: int = 1) -> str:
    """The number of ranks, for the start-up line; "": one. `num_stages`: each has `num_ranks`."""
    stages = f", {num_stages} stages" if num_stages > 1 else ""
    return f"{stages}, {num_ranks} ranks{' each' if stages else ''}" if num_ranks > 1 else stages
