"""Scoring of checked (prompt, completion) pairs; a completion without tokens has no scores, and costs nothing."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Scorer(Protocol):
    """What computes: an executor."""

    def score(self, sequences: list[list[int]], num_prompt: list[int], temperature: float) -> list[np.ndarray]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt, under the live weights."""
        ...


def score_pairs(scorer: Scorer, pairs: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[np.ndarray]:
    """Log-probs of completions, per pair float32 [len(completion)]; temperature 0 counts as 1."""
    asked = [i for i, (_, completion) in enumerate(pairs) if completion]
    scores = [np.zeros(0, dtype=np.float32) for _ in pairs]
    sequences = [prompt + completion for prompt, completion in (pairs[i] for i in asked)]
    values = scorer.score(sequences, [len(pairs[i][0]) for i in asked], temperature or 1.0) if asked else []
    for i, value in zip(asked, values, strict=True):
        scores[i] = value
    return scores
