"""Log-probs of given sequences, by the trainer's own function on the engine's module (on the CPU)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from rollout_engine.kernels.token_logprobs import row_stats
from rollout_engine.model.modules.next_token_logprobs import right_padded_logprobs

_LOGIT_BYTES = 256 << 20
"""Bytes of logits that exist at a time, unless a single sequence needs more."""
_TOKENS = 512
"""Tokens computed at a time, unless a single sequence has more: as many as steps take of prompts while they decode."""


def sequence_logprobs(
    module: nn.Module,
    sequences: Sequence[list[int]],
    num_prompt: Sequence[int],
    *,
    temperature: float,
    vocab_size: int,
    around: Callable[[list[int], int], AbstractContextManager[object]] = lambda *_: nullcontext(),
) -> Iterator[dict[int, np.ndarray]]:
    """Yield, a batch at a time, the log-prob of every token after the prompt: index -> float32 [len - num_prompt].

    `around`: makes the context manager of each forward, given the indices of its sequences and their padded length.
    """
    for members in _batches(sequences, min(_LOGIT_BYTES // (4 * vocab_size), _TOKENS)):
        ids = pad_sequence([torch.tensor(sequences[i], dtype=torch.int64) for i in members], batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(sequences[i]) for i in members])[:, None]
        with torch.no_grad(), around(members, ids.shape[1]):
            values = right_padded_logprobs(module, ids, mask, temperature or 1.0, row_stats).numpy()
        yield {i: values[row, num_prompt[i] - 1 : len(sequences[i]) - 1].copy() for row, i in enumerate(members)}


def _batches(sequences: Sequence[list[int]], budget: int) -> Iterator[list[int]]:
    """Indices of sequences, longest first, in batches of at most `budget` padded tokens (or one sequence)."""
    batch: list[int] = []
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        if batch and (len(batch) + 1) * len(sequences[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
