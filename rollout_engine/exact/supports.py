"""Sets of tokens over which log-probs are renormalised, as an engine does for those of mode "processed".

A support has a row for each of the last tokens of its sequence, its response. Tokens before them, and those with an
empty row, have log-probs of the whole vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.support import Support, checked_support
from rollout_engine.kernels.row_stats import TokenSets
from rollout_engine.model.modules.next_token_logprobs import NextTokens
from rollout_engine.model.modules.packed_rows import starts_of


def sets_of(
    support: Any, found: NextTokens, real: Tensor, positions: Tensor | None
) -> tuple[NextTokens, TokenSets | None]:
    """Next tokens and their sets by `support`, a batch's column or a list with one of each sequence; None: no sets.

    The sequences are those of `real` bool [B, T], packed by `positions` [B, T] if given. Next tokens that share a row
    but not a support are returned apart. Raises `RequestError` for supports that do not fit the sequences, and for one
    that lacks the token that was drawn from it.
    """
    if support is None:
        return found, None
    if not found.logits.is_cpu:
        bound, hint = "left out for a model on a device", "Log-probs over supports are computed on a CPU alone."
        raise RequestError.for_field("support", type(support).__name__, bound, hint)
    supports = support.tolist() if hasattr(support, "tolist") else support
    if not isinstance(supports, list | tuple):
        raise RequestError.for_field("support", type(support).__name__, "batch['support'], or a list of Support")
    lengths = _lengths(real, positions)
    sets = _sets(supports, lengths, found.logits.shape[1])
    _require_tokens(found, sets, lengths)
    return _one_set_each(found, sets)


def _lengths(real: Tensor, positions: Tensor | None) -> list[int]:
    """Number of tokens of each sequence."""
    if positions is None:
        lengths: list[int] = real.sum(1).tolist()
        return lengths
    edges = torch.cat([starts_of(positions)[real].nonzero()[:, 0], real.sum()[None]])
    return [int(length) for length in edges.diff()]


def _sets(supports: Sequence[Any], lengths: Sequence[int], vocab_size: int) -> TokenSets:
    """The sets of all tokens but the first of each sequence, sequence after sequence."""
    if len(supports) != len(lengths):
        raise RequestError.for_field("support", f"{len(supports)} of them", f"one for each of {len(lengths)} sequences")
    counts, ids = [np.zeros(1, np.int64)], [np.empty(0, np.int32)]
    for index, (each, length) in enumerate(zip(supports, lengths, strict=True)):
        support: Support = checked_support(f"support[{index}]", each, vocab_size)
        if len(support) > length:
            what = f"{len(support)} rows"
            raise RequestError.for_field(f"support[{index}]", what, f"at most {length}, the tokens of its sequence")
        num_next = max(length - 1, 0)
        first = max(len(support) - num_next, 0)  # the first token of a sequence has no log-prob
        own = np.zeros(num_next, np.int64)
        own[num_next - len(support) + first :] = support.counts[first:]
        counts.append(own)
        ids.append(support.ids[support.offsets[first] :])
    return TokenSets(torch.from_numpy(np.concatenate(counts).cumsum()), torch.from_numpy(np.concatenate(ids)))


def _require_tokens(found: NextTokens, sets: TokenSets, lengths: Sequence[int]) -> None:
    """Raise `RequestError` if a token is not in its own set."""
    tokens = found.token_ids if found.places is None else found.token_ids[found.places]
    counts = sets.starts.diff()
    rows, vocab_size = torch.arange(len(counts)), found.logits.shape[1]
    keys = rows.repeat_interleave(counts) * vocab_size + sets.ids  # ascending, for rows and ids ascend
    listed = counts > 0
    wanted = (rows * vocab_size + tokens)[listed]
    places = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
    missing = keys[places] != wanted
    if bool(missing.any()):
        row = int(rows[listed][missing][0])
        sequence, token = next(_tokens_of_rows(row, lengths))
        hint = "Give the supports of these very tokens, in the order of the batch's sequences."
        bound = "supports that hold the tokens that were drawn from them"
        raise RequestError.for_field(f"support[{sequence}]", f"without token {token}, {int(tokens[row])}", bound, hint)


def _tokens_of_rows(row: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The sequence, and the token in it, of a row of all next tokens."""
    for sequence, length in enumerate(lengths):
        if row < length - 1:
            yield sequence, row + 1
        row -= max(length - 1, 0)


def _one_set_each(found: NextTokens, sets: TokenSets) -> tuple[NextTokens, TokenSets]:
    """Next tokens with one set each: those that several sequences share stay so if they agree on it."""
    if found.places is None:
        return found, sets
    counts, places = sets.starts.diff(), found.places
    order = torch.arange(len(places))
    first = torch.full((len(found.logits),), len(places)).scatter_reduce(0, places, order, "amin")
    other = first[places]
    is_same = bool((counts == counts[other]).all())
    shared = ((other != order) & (counts > 0)).nonzero()[:, 0].tolist() if is_same else []
    if not is_same or not all(torch.equal(_row(sets, i), _row(sets, int(other[i]))) for i in shared):
        apart = NextTokens(found.logits.index_select(0, places), found.token_ids[places], found.wanted)
        return apart, sets
    counts = counts[first]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    moved = (sets.starts[first] - starts[:-1]).repeat_interleave(counts) + torch.arange(int(starts[-1]))
    return found, TokenSets(starts, sets.ids[moved])


def _row(sets: TokenSets, row: int) -> Tensor:
    return sets.ids[int(sets.starts[row]) : int(sets.starts[row + 1])]
