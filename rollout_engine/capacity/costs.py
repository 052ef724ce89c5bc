"""The cost of a step as a sum of four parts, and the fit of such a sum to measured steps."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rollout_engine.base.errors import ConfigError

_NUM_ROUNDS = 8
"""Of the fit, each weighted by the one before."""


class StepShape(NamedTuple):
    """Counts of the work in a step, as far as its time depends on them."""

    num_rows: int
    """Sequences that decode: one new token each."""
    num_prefill_tokens: int
    """Tokens of all other sequences."""
    num_context_tokens: int
    """KV tokens that the step attends, its own included, summed over its sequences."""


class StepCosts(NamedTuple):
    """Seconds of a step: step + row x rows + prefill_token x prefill tokens + context_token x context tokens."""

    step_seconds: float
    row_seconds: float
    prefill_token_seconds: float
    context_token_seconds: float

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return (
            self.step_seconds
            + self.row_seconds * shape.num_rows
            + self.prefill_token_seconds * shape.num_prefill_tokens
            + self.context_token_seconds * shape.num_context_tokens
        )


class Fit(NamedTuple):
    """Costs fitted to measured steps, and how well they fit."""

    costs: StepCosts
    total_error: float
    """Seconds of all steps by the costs / measured, minus 1."""
    p95_error: float
    """95th percentile over the steps of |by the costs / measured - 1|."""
    num_steps: int


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> Fit:
    """Fit costs to measured steps by least squares, no cost below 0.

    A step counts by 1 / its fitted seconds, as in a Poisson regression: short steps count as well as long ones, and the
    sum of all steps is as measured. Raises `ConfigError` for fewer steps than costs.
    """
    if len(seconds) < len(StepCosts._fields):
        least = len(StepCosts._fields)
        raise ConfigError(f"{len(seconds)} measured steps are too few to fit the costs of a step: at least {least}.")
    measured = np.asarray(seconds, dtype=np.float64)
    parts = np.column_stack([np.ones(len(shapes)), np.asarray(shapes, dtype=np.float64)])
    reckoned = measured
    for _ in range(_NUM_ROUNDS):
        found = _least_squares(parts, measured, 1 / np.sqrt(np.maximum(reckoned, 1e-9 * measured.max())))
        reckoned = parts @ found
    return Fit(
        StepCosts(*map(float, found)),
        total_error=float(reckoned.sum() / measured.sum() - 1),
        p95_error=float(np.quantile(np.abs(reckoned / measured - 1), 0.95)),
        num_steps=len(measured),
    )


def _least_squares(parts: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares without a negative result: the best over every subset of the few columns."""
    weighted, wanted = parts * weights[:, None], values * weights
    best, least_error = np.zeros(parts.shape[1]), np.inf
    for size in range(1, parts.shape[1] + 1):
        for chosen in map(list, combinations(range(parts.shape[1]), size)):
            found, *_ = np.linalg.lstsq(weighted[:, chosen], wanted, rcond=None)
            error = float(np.sum((weighted[:, chosen] @ found - wanted) ** 2))
            if found.min() >= 0 and error < least_error:
                best, least_error = np.zeros(parts.shape[1]), error
                best[chosen] = found
    return best
