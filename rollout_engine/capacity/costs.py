"""What a step costs, as a sum of four parts, and the fit of such a sum to measured steps."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rollout_engine.errors import ConfigError


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

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
    """Fit costs to measured steps by least squares of relative errors, no cost below 0.

    The best of the fits over every subset of the four parts: with so few, that is the exact solution. Raises
    `ConfigError` for fewer steps than parts.
    """
    if len(seconds) < len(StepCosts._fields):
        least = len(StepCosts._fields)
        raise ConfigError(f"{len(seconds)} measured steps are too few to fit the costs of a step: at least {least}.")
    measured = np.asarray(seconds, dtype=np.float64)
    parts = np.column_stack([np.ones(len(shapes)), np.asarray(shapes, dtype=np.float64)])
    scaled = parts / measured[:, None]
    best, least_error = np.zeros(parts.shape[1]), np.inf
    for size in range(1, parts.shape[1] + 1):
        for chosen in combinations(range(parts.shape[1]), size):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(measured)), rcond=None)
            error = float(np.sum((scaled[:, chosen] @ found - 1.0) ** 2))
            if found.min() >= 0 and error < least_error:
                best, least_error = np.zeros(parts.shape[1]), error
                best[list(chosen)] = found
    reckoned = parts @ best
    return Fit(
        StepCosts(*map(float, best)),
        total_error=float(reckoned.sum() / measured.sum() - 1),
        p95_error=float(np.quantile(np.abs(reckoned / measured - 1), 0.95)),
        num_steps=len(measured),
    )
