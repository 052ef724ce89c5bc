"""Log-probs of given and of most likely tokens at each position of completions, as a scoring engine returns them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import MAX_LOGPROB_VALUES, MAX_PROMPT_LOGPROBS


class AskedScores(msgspec.Struct, frozen=True, eq=False):
    """The scores that are asked for, in addition to those of the tokens themselves."""

    candidate_ids: list[np.ndarray] | None = None
    """For each completion int32 [its tokens, K]."""
    num_top: int = 0
    """Most likely tokens of each place."""

    def of(self, members: Sequence[int]) -> "AskedScores":
        """Those of some of the completions."""
        given = self.candidate_ids
        return self if given is None else AskedScores([given[i] for i in members], self.num_top)


TOKENS_ALONE = AskedScores()
"""No scores in addition to those of the tokens themselves."""


class TokenScores(msgspec.Struct, frozen=True, eq=False):
    """Scores of N tokens: each behind the tokens before it, as parts of one log-softmax over the whole vocabulary."""

    logprobs: np.ndarray
    """float32 [N], of the tokens themselves."""
    candidates: np.ndarray | None = None
    """float32 [N, K], of the candidates for the place of each; None if none were given."""
    top_ids: np.ndarray | None = None
    """int32 [N, k], the most likely tokens of each place, ties by id; None if none were asked for."""
    top_logprobs: np.ndarray | None = None
    """float32 [N, k], theirs."""

    @classmethod
    def empty(cls, num_candidates: int | None, num_top: int) -> "TokenScores":
        """Scores of no tokens."""
        return cls(
            np.zeros(0, np.float32),
            None if num_candidates is None else np.zeros((0, num_candidates), np.float32),
            np.zeros((0, num_top), np.int32) if num_top else None,
            np.zeros((0, num_top), np.float32) if num_top else None,
        )

    @classmethod
    def join(cls, parts: Sequence["TokenScores"]) -> "TokenScores":
        """The scores of all parts, at least one, end to end."""
        columns = ([getattr(part, name) for part in parts] for name in cls.__struct_fields__)
        joined: list[Any] = [None if column[0] is None else np.concatenate(column) for column in columns]
        return cls(*joined)


def as_candidates(given: Any) -> np.ndarray | None:
    """Candidates as an array; None: none. Raises `RequestError` for lists of several lengths."""
    try:
        array = None if given is None else np.asarray(given)
    except ValueError:
        array = np.asarray(None)
    if array is not None and array.dtype == object:
        bound = "integers [N, K], as many for each token of the completions"
        raise RequestError.for_field("candidate_ids", given, bound)
    return array


def divide_candidates(given: np.ndarray | None, lengths: Sequence[int], vocab_size: int) -> list[np.ndarray] | None:
    """Candidates [N, K] of completions with these lengths, N together -> int32 [length, K] of each.

    Raises `RequestError` for other shapes, for ids outside the vocabulary, and for more than can be returned.
    """
    if given is None:
        return None
    num = sum(lengths)
    if given.ndim != 2 or given.shape[0] != num or given.dtype.kind not in "iu":
        bound = f"integers [{num}, K], a row for each token of the completions"
        raise RequestError.for_field("candidate_ids", f"{given.dtype} {list(given.shape)}", bound)
    if given.size > MAX_LOGPROB_VALUES:
        bound = f"at most {MAX_LOGPROB_VALUES} in all"
        raise RequestError.for_field("candidate_ids", f"{given.size} ids", bound, "Give fewer completions at a time.")
    outside = (given < 0) | (given >= vocab_size)
    if outside.any():
        row, column = np.argwhere(outside)[0].tolist()
        raise RequestError.for_field(
            f"candidate_ids[{row}][{column}]", int(given[row, column]), f"in [0, {vocab_size})"
        )
    return np.split(given.astype(np.int32), np.cumsum(lengths)[:-1]) if lengths else []


def check_num_top(num_top: int, num_tokens: int, vocab_size: int) -> None:
    """Raise `RequestError` unless that many of the most likely tokens can be returned for each of `num_tokens`."""
    most = min(MAX_PROMPT_LOGPROBS, vocab_size)
    if type(num_top) is not int or not 0 <= num_top <= most:
        raise RequestError.for_field("top_k", num_top, f"an int in [0, {most}]")
    if num_top * num_tokens > MAX_LOGPROB_VALUES:
        bound = f"at most {MAX_LOGPROB_VALUES // num_tokens} for {num_tokens} tokens"
        raise RequestError.for_field("top_k", num_top, bound, "Give fewer completions at a time.")
