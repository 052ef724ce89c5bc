"""Optional columns of a rollout with values of each sampled token: entropies, the most likely tokens, hidden states."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.sampling_params import MAX_LOGPROBS
from rollout_engine.batches.layout import Key

FILL: dict[Key, float] = {
    ("entropy", "full"): 0.0,
    ("top_k", "ids"): -1,
    ("top_k", "log_probs"): -np.inf,
    "hidden_states": 0.0,
}
"""Values of the columns outside of sampled tokens."""
Top = tuple[np.ndarray, np.ndarray]
"""Ids and log-probs of the most likely tokens at each position, [T, k]."""


def sampled_columns(samples: Sequence[CompletionOutput]) -> Iterator[tuple[Key, np.ndarray]]:
    """The columns that some sample has, each with its values of all sampled tokens end to end; `FILL` for the others.

    The k of ("top_k", ...) is the largest of all samples. `logprobs=-1` gives none: it is a column of the vocabulary.
    """
    counts = [len(sample.token_ids) for sample in samples]
    if any(sample.entropies is not None for sample in samples):
        parts = [sample.entropies for sample in samples]
        yield ("entropy", "full"), _join_parts(parts, counts, (), np.dtype(np.float32), 0.0)
    tops = [top_of(sample) for sample in samples]
    if any(top is not None for top in tops):
        shape = (max(top[0].shape[1] for top in tops if top is not None),)
        ids, logprobs = ([None if top is None else top[place] for top in tops] for place in range(2))
        yield ("top_k", "ids"), _join_parts(ids, counts, shape, np.dtype(np.int64), -1)
        yield ("top_k", "log_probs"), _join_parts(logprobs, counts, shape, np.dtype(np.float32), -np.inf)


def hidden_states(outputs: Sequence[RequestOutput]) -> np.ndarray | None:
    """The state behind which each token of prompts and completions stands, all sequences end to end, float32 [N, H].

    0 for tokens without one, such as the first of each sequence. None if no output has states.
    """
    parts: list[tuple[int, np.ndarray | None]] = []
    end = 0
    for output in outputs:
        for sample in output.outputs:
            prompt, start = output.prompt_hidden_states, end + len(output.prompt_token_ids)
            parts += [(end + 1, None if prompt is None else prompt[:-1]), (start, sample.hidden_states)]
            end = start + len(sample.token_ids)
    return placed_rows(parts, end, 0.0)


def top_of(sample: CompletionOutput) -> Top | None:
    """The most likely tokens of a sample that asked for some with `logprobs=k`."""
    top = sample.top_logprobs
    return top if top is not None and 0 < top[0].shape[1] <= MAX_LOGPROBS else None


def top_rows(ids: Any, logprobs: Any) -> list[list[list[Any]]]:
    """Lists of [id, log-prob] for each of T tokens, as JSON has them, of [T, k]: null for -inf, without padding."""
    return [
        [[token_id, None if value == -np.inf else value] for token_id, value in zip(*row, strict=True) if token_id >= 0]
        for row in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def placed_rows(parts: Iterable[tuple[int, np.ndarray | None]], length: int, fill: float) -> np.ndarray | None:
    """Rows of one response of `length` tokens, `fill` but for `parts`: (start, values [n, ...]); None if all are None.

    Values of fewer columns than others are filled up on the right.
    """
    given = [(start, values) for start, values in parts if values is not None]
    if not given:
        return None
    first = given[0][1]
    shape = tuple(max(sizes) for sizes in zip(*(values.shape[1:] for _, values in given), strict=True))
    placed = np.full((length, *shape), fill, first.dtype)
    for start, values in given:
        placed[(slice(start, start + len(values)), *map(slice, values.shape[1:]))] = values
    return placed


def _join_parts(
    parts: Sequence[np.ndarray | None], counts: Sequence[int], shape: tuple[int, ...], dtype: np.dtype[Any], fill: float
) -> np.ndarray:
    """All parts end to end, [sum of counts, *shape]; `fill` for those that are None, and right of narrow ones."""
    found = np.full((sum(counts), *shape), fill, dtype)
    end = 0
    for part, count in zip(parts, counts, strict=True):
        end += count
        if part is not None:
            found[(slice(end - count, end), *map(slice, part.shape[1:]))] = part
    return found
