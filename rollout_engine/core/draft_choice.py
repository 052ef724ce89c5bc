"""Which of the drafted tokens are computed: as many as give the most tokens a second, the likeliest first."""

from bisect import bisect_left
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.core.request import Sequence

LEAST_EXPECTED_GAIN = 1.1
"""Tokens a second with drafts over those without, below which none are added: costs and rates are estimates."""
SECONDS_PER_TOKEN = 40e-6
"""Host time for each token that a sequence gains: a step with drafts saves none of it."""
_NUM_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class Proposal:
    """A draft for one row of a step."""

    row: ScheduledSequence
    sequence: Sequence
    token_ids: list[int]
    chances: list[float]
    """Probability, for each token, that it is right and so are all before it."""
    source: str
    """One of the sources that `DraftStats` distinguishes."""


class StepCosts:
    """Seconds of a step by its number of rows: measured at some, straight lines between them and beyond."""

    def __init__(self, measured: Rows[tuple[int, float]], drafted: Rows[tuple[int, float]] = ()) -> None:
        """`measured` and `drafted` are (rows, seconds), ascending: of steps without and with drafted tokens.

        If `drafted` is empty, steps with drafted tokens cost as much as the others.
        """
        assert len(measured) >= 2, "two measured costs at least"
        self._rows = [rows for rows, _ in measured]
        self._seconds = [seconds for _, seconds in measured]
        self._drafted = StepCosts(drafted) if drafted else self

    def with_drafts(self, num_rows: int) -> float:
        """Seconds of a step of `num_rows` rows, some of which are drafted tokens."""
        return self._drafted.of(num_rows)

    def of(self, num_rows: int) -> float:
        """Seconds of a step of `num_rows` rows."""
        right = min(max(bisect_left(self._rows, num_rows), 1), len(self._rows) - 1)
        (x0, x1), (y0, y1) = self._rows[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return y0 + (num_rows - x0) * (y1 - y0) / (x1 - x0)


class RightRates:
    """How often a drafted token is right, by the kind of token.

    The mean of the observed ones, and of one right and one wrong token to begin with; the newest 64 count most.
    """

    def __init__(self, num_kinds: int) -> None:
        self._rates = [0.5] * num_kinds
        self._counts = [2] * num_kinds

    def of(self, kind: int) -> float:
        """The rate of a kind."""
        return self._rates[kind]

    def learn(self, kind: int, is_right: bool) -> None:
        """Count one token of a kind."""
        count = self._counts[kind] = min(self._counts[kind] + 1, _NUM_REMEMBERED)
        self._rates[kind] += (is_right - self._rates[kind]) / count


def choose(proposals: Rows[Proposal], costs: StepCosts, num_rows: int, num_samples: int, most: int) -> list[int]:
    """How many first tokens of each draft to compute along with `num_rows` rows that draw `num_samples` tokens.

    `most`: tokens of all drafts that a step has room for.
    """
    chances = [(chance, index) for index, each in enumerate(proposals) for chance in each.chances]
    chances.sort(key=lambda each: -each[0])  # stable: of one sequence, the first tokens first
    expected = float(num_samples)
    best = LEAST_EXPECTED_GAIN * expected / (costs.of(num_rows) + SECONDS_PER_TOKEN * expected)
    num_chosen = 0
    for num, (chance, _) in enumerate(chances[:most], start=1):
        expected += chance
        rate = expected / (costs.with_drafts(num_rows + num) + SECONDS_PER_TOKEN * expected)
        if rate > best:
            best, num_chosen = rate, num
    counts = [0] * len(proposals)
    for _, index in chances[:num_chosen]:
        counts[index] += 1
    return counts
