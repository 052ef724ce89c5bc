"""The support of sampled tokens: for each of them the token ids that truncation and masks had left to the draw.

    token                 4        7        0        9
    ids left to its draw  3 4 8    7        all      2 9

    offsets  0 3 4 4 6        ids  3 4 8 7 2 9

Row i has `ids[offsets[i]:offsets[i + 1]]`, ascending. A sampled token is in its own support, so an empty row cannot
stand for none: nothing was cut, and it stands for the whole vocabulary. Tokens that were not sampled, such as those of
a tool, have such rows too.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.sampling_params import SamplingParams

MAX_SUPPORT_IDS = 1 << 28
"""Most ids that `return_support` returns for one request: 1 GiB of them. Each of its samples has an equal share."""
_EXPECTED = "a Support(offsets, ids), as batch['support'] has for each sequence"


class Support(msgspec.Struct, frozen=True, eq=False):
    """Supports of T tokens of one sequence, end to end. Not to be changed."""

    offsets: np.ndarray
    """int64 [T + 1], from 0."""
    ids: np.ndarray
    """int32 [offsets[T]], ascending in each row; an empty row stands for the whole vocabulary."""

    @classmethod
    def of(cls, rows: Iterable[Any]) -> "Support":
        """Pack one array or list of ascending ids for each token."""
        arrays = [np.asarray(row, np.int32) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(offsets, np.concatenate([np.empty(0, np.int32), *arrays]))

    @classmethod
    def place(cls, parts: Iterable[tuple[int, "Support"]], num_tokens: int) -> "Support":
        """The supports of `num_tokens` tokens: each part's from its start on, and empty rows between the parts."""
        counts, ids = np.zeros(num_tokens, np.int64), [np.empty(0, np.int32)]
        for start, part in parts:
            counts[start : start + len(part)] = part.counts
            ids.append(part.ids)
        return cls(np.concatenate([np.zeros(1, np.int64), counts.cumsum()]), np.concatenate(ids))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """int64 [T]: ids of each row, 0 for the whole vocabulary."""
        return np.diff(self.offsets)

    def lists(self) -> list[list[int]]:
        """The ids of each token as lists, as JSON has them."""
        ids: list[int] = self.ids.tolist()
        return [ids[start:end] for start, end in pairwise(self.offsets.tolist())]


def support_of(sample: CompletionOutput) -> Support:
    """The support of a sample's tokens, with empty rows if the sample has none."""
    return Support.place([], len(sample.token_ids)) if sample.support is None else Support(*sample.support)


def checked_support(field: str, given: Any, vocab_size: int) -> Support:
    """Return `given` if it is a `Support` of ids of the vocabulary. Raises `RequestError` naming the first bad row."""
    if not isinstance(given, Support):
        raise RequestError.for_field(field, type(given).__name__, _EXPECTED)
    offsets, ids = given.offsets, given.ids
    fits = isinstance(offsets, np.ndarray) and isinstance(ids, np.ndarray) and offsets.ndim == ids.ndim == 1
    fits = fits and offsets.dtype == np.int64 and ids.dtype == np.int32 and len(offsets) > 0
    if not fits or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        what = "offsets that do not divide its ids" if fits else "other arrays"
        raise RequestError.for_field(field, what, "int64 offsets [T + 1] from 0, rising to the number of int32 ids")
    descends = np.zeros(len(ids), np.bool_)
    descends[1:] = ids[1:] <= ids[:-1]
    descends[offsets[:-1][offsets[:-1] < len(ids)]] = False  # first ids of rows
    wrong = descends | (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        row = int(np.searchsorted(offsets, place, "right")) - 1
        bound = f"ascending ids in [0, {vocab_size}), the vocabulary"
        raise RequestError.for_field(f"{field}[{row}]", int(ids[place]), bound)
    return given


def is_over_support(params: SamplingParams) -> bool:
    """Whether log-probs are those of the model's own logits among the tokens of supports that are returned.

    With penalties or `logit_bias` they are of logits that no trainer has, and logits processors may change any.
    """
    is_edited = params.penalises or bool(params.logit_bias)
    return params.return_support and params.logprobs_mode == "processed" and not is_edited


def check_support_asked(is_asked: bool, is_on_host: bool) -> None:
    """Raise `RequestError` for `return_support` unless the engine draws on the host (`is_on_host`)."""
    if is_asked and not is_on_host:
        hint = "Draws of devices do not return it."
        raise RequestError.for_field("return_support", True, "False with device='cuda'", hint)


def check_num_support_ids(params: SamplingParams, max_tokens: int, vocab_size: int) -> None:
    """Raise `RequestError` if the supports of a request may take more than can be held.

    If top-p, min-p or a grammar alone bounds them, their size is known only as tokens are drawn: a sample ends with an
    error at the token whose support exceeds its share (`too_many_support_ids`).
    """
    if not params.return_support:
        return
    width = _most_ids(params, vocab_size)
    num_tokens = max_tokens if params.bad_words or width < vocab_size else min(params.min_tokens, max_tokens)
    count, room = params.n * num_tokens * width, MAX_SUPPORT_IDS // max(1, params.n * width)
    if count > MAX_SUPPORT_IDS:
        what = f"n={params.n} x {num_tokens} tokens x up to {width} ids = {count} ids"
        hint = f"{what}. Give a lower top_k, " + (f"or max_tokens={room} or less." if room else "or a smaller n.")
        raise RequestError.for_field("return_support", True, f"for at most {MAX_SUPPORT_IDS} ids a request", hint)


def too_many_support_ids(num_ids: int, num_samples: int) -> str:
    """Why a sample ends whose supports have `num_ids` ids, if these are more than its share; else ""."""
    share = MAX_SUPPORT_IDS // num_samples
    if num_ids <= share:
        return ""
    what = f"return_support: the tokens so far were drawn from {num_ids} ids in all"
    return f"{what}, and a sample may return {share} of them ({MAX_SUPPORT_IDS} / n). Give a top_k, or a lower top_p."


def _most_ids(params: SamplingParams, vocab_size: int) -> int:
    """Most ids of one support; 0 if none is listed, or if their number depends on the draw."""
    widths = [vocab_size]
    if params.temperature > 0 and params.top_k:
        widths.append(params.top_k)
    if params.allowed_token_ids:
        widths.append(len(set(params.allowed_token_ids)))
    if len(widths) == 1 and (params.truncates or params.structured_outputs is not None):
        return 0
    return min(widths) if len(widths) > 1 or params.bad_words or params.min_tokens else 0
