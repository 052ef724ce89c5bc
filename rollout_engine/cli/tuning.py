"""Compares values of engine options with the default by measuring both in turns, and proposes the surely faster ones.

Each value runs next to the default: one round of each, in changing order, several times. A pair of rounds gives one
ratio, so that whatever slows the machine down for longer than a round slows both. A value is proposed if the median
ratio is above 1.02 and no pair contradicts it; all proposals together then have to win once more, in new rounds.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

LEAST_GAIN = 1.02
"""Median ratio above which a value counts as faster."""

Options = Mapping[str, Any]
"""Names of engine options -> values that are not the default."""
Round = Callable[[int], float]
"""Runs round i of a work on one engine, and returns its tokens per second."""
StartEngine = Callable[[Options], AbstractContextManager[Round]]
"""Starts an engine with options, and shuts it down."""


class Trial(NamedTuple):
    """An option, and the values to compare with its default."""

    option: str
    values: Sequence[Any]
    default: Any
    """The value that the default amounts to here, for the report."""
    left_out: str = ""
    """Why other values are not tried; empty: they are."""


class Comparison(NamedTuple):
    """Rounds of some options, and as many of the default."""

    options: dict[str, Any]
    rates: list[float]
    """Tokens per second of each round."""
    default_rates: list[float]
    """The same of the default, pair by pair."""

    @property
    def ratios(self) -> list[float]:
        """Ratio of each pair, this / the default."""
        return [rate / default for rate, default in zip(self.rates, self.default_rates, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def is_faster(self) -> bool:
        """Whether it beats the default by more than the noise: clearly in the median, and in every pair."""
        return self.ratio > LEAST_GAIN and min(self.ratios) > 1

    @property
    def is_slower(self) -> bool:
        """Whether the default beats it by more than the noise."""
        return self.ratio < 1 / LEAST_GAIN and max(self.ratios) < 1


class Proposal(NamedTuple):
    """Results of all trials, and the options that they recommend."""

    trials: list[tuple[Trial, list[Comparison]]]
    together: Comparison | None
    """All winners together and the default, in rounds of their own; None if no value won."""
    options: dict[str, Any]
    """Options to set; empty if the defaults are as good as anything measured."""


def propose(
    trials: Sequence[Trial], start_engine: StartEngine, num_rounds: int, is_over: Callable[[], bool] = lambda: False
) -> Proposal:
    """Compare every value of every trial with the default, and the winners together.

    Two engines are up at a time. `is_over` ends it early: options not compared by then keep their defaults.
    """
    measured: list[tuple[Trial, list[Comparison]]] = []
    winners: dict[str, Any] = {}
    with start_engine({}) as default:
        for trial in trials:
            found: list[Comparison] = []
            for value in trial.values:
                if is_over():
                    trial = trial._replace(left_out="the time was up")
                    break
                found.append(_compare({trial.option: value}, start_engine, default, num_rounds))
            measured.append((trial, found))
            faster = [each for each in found if each.is_faster]
            if faster:
                winners |= max(faster, key=lambda each: each.ratio).options
        together = _compare(winners, start_engine, default, num_rounds) if winners and not is_over() else None
    return Proposal(measured, together, winners if together is not None and together.is_faster else {})


def _compare(options: Options, start_engine: StartEngine, default: Round, num_rounds: int) -> Comparison:
    found = Comparison(dict(options), [], [])
    with start_engine(options) as candidate:
        for run in (candidate, default):
            run(0)  # warms up
        for i in range(1, num_rounds + 1):
            for run, rates in _in_turns(i, (candidate, found.rates), (default, found.default_rates)):
                rates.append(run(i))
    return found


def _in_turns(i: int, *pair: tuple[Round, list[float]]) -> Iterator[tuple[Round, list[float]]]:
    yield from pair if i % 2 else reversed(pair)
