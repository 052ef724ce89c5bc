"""A batch as one row of tokens, in which a beginning that several of its rows share stands once.

    rows                 7 3 9 4         input_ids      7  3  9  4  8  5
                         7 3 8 5         position_ids   0  1  2  3  2  3

The samples of a prompt begin with it, so it is computed once for all of them. `packed_rows` shows how attention reads
such a row.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class SharedRows(NamedTuple):
    """The N different tokens of a batch [B, T], and the M different pairs of a token and the next one."""

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]."""
    sources: Tensor
    """int64 [M]: which of the N the first token of each pair is."""
    targets: Tensor
    """int64 [M]: id of the second."""
    wanted: Tensor
    """bool [B, L]: whether the next token is real; L + 1 tokens are in the longest row."""
    places: Tensor
    """int64 [number of wanted]: which of the M each of them is."""
    tokens: Tensor
    """int64 [N]: number of each token in the flattened batch, B * T."""

    @classmethod
    def of(cls, input_ids: Tensor, real: Tensor, keys: Tensor | None = None) -> "SharedRows":
        """Share the rows of input_ids int64 [B, T].

        Their real tokens, by `real` bool [B, T], stand to the left, with 0 behind them. `keys` int64 [B, T]: tokens are
        alike if these are equal; None: if their ids are.
        """
        length = max(int(real.sum(1).max()), 2)
        compared = (input_ids if keys is None else keys)[:, :length]
        order = _sorted_rows(compared)
        ids, is_real = input_ids[order, :length], real[order, :length]
        columns = torch.arange(length, device=ids.device)
        begins = _own_from(compared[order], is_real)[:, None]
        own = is_real & (columns >= begins)
        owners = _numbered(own)
        wanted = is_real[:, 1:]
        fresh = wanted & (columns[:-1] >= begins - 1)  # the pair with the last shared token is a row's own
        places = torch.empty_like(owners[:, 1:])
        places[order] = _numbered(fresh)
        wanted = real[:, 1:length]
        return cls(
            input_ids=ids[own][None],
            position_ids=columns.expand(ids.shape)[own][None],
            sources=owners[:, :-1][fresh],
            targets=ids[:, 1:][fresh],
            wanted=wanted,
            places=places[wanted],
            tokens=(order[:, None] * input_ids.shape[1] + columns)[own],
        )


def _sorted_rows(ids: Tensor) -> Tensor:
    """int64 [B]: an order of the rows of ids [B, T] in which those that begin alike are next to each other."""
    rows = ids.cpu().numpy().astype(np.int64)
    keys = [row.tobytes() for row in rows]  # any order of tokens will do
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), device=ids.device)


def _own_from(ids: Tensor, real: Tensor) -> Tensor:
    """int64 [B]: how many tokens each row shares with the row before it; the last token of a row is always its own."""
    alike = (ids[1:] == ids[:-1]) & real[1:] & real[:-1]
    shared = alike.long().cumprod(1).sum(1)
    most = (real[1:].sum(1) - 1).clamp(min=0)
    return torch.cat([shared.new_zeros(1), shared.minimum(most)])


def _numbered(own: Tensor) -> Tensor:
    """Number the True entries of `own` bool [B, T] row by row; each other entry has the number of the one above it."""
    numbers = (own.flatten().cumsum(0) - 1).view(own.shape)
    return torch.where(own, numbers, -1).cummax(0).values
