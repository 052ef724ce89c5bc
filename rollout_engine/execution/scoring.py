"""Log-probs of tokens that were not sampled here, by the trainer's own function on the engine's live module."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from rollout_engine import exact

_LOGIT_BYTES = 256 << 20
"""Logits that exist at a time, where one sequence does not need more."""


def score(
    module: nn.Module, sequences: Sequence[list[int]], num_prompt: Sequence[int], *, temperature: float, vocab_size: int
) -> list[np.ndarray]:
    """Log-prob of every token after the prompt: per sequence float32 [len - num_prompt]."""
    results: dict[int, np.ndarray] = {}
    for members in _batches(sequences, _LOGIT_BYTES // (4 * vocab_size)):
        length = len(sequences[members[0]])
        ids = torch.zeros(len(members), length, dtype=torch.int64)
        for row, i in enumerate(members):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
        mask = torch.arange(length) < torch.tensor([len(sequences[i]) for i in members])[:, None]
        with torch.no_grad():
            values = exact.right_padded_logprobs(module, ids, mask, temperature or 1.0).numpy()
        for row, i in enumerate(members):
            results[i] = values[row, num_prompt[i] - 1 : len(sequences[i]) - 1].copy()
    return [results[i] for i in range(len(sequences))]


def _batches(sequences: Sequence[list[int]], budget: int) -> Iterator[list[int]]:
    """Indices, longest first, in batches of at most `budget` padded tokens (or one sequence)."""
    batch: list[int] = []
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        if batch and (len(batch) + 1) * len(sequences[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
