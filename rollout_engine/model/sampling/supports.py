"""Supports of drawn tokens: the ids that truncation and masks had left to the draw, for the rows that ask.

A row from which nothing was cut has an empty support, which stands for the whole vocabulary: a drawn token is in its
support, so that no other row has an empty one.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.truncation import kept_ids

_ALL = np.empty(0, np.int32)
_LAST = torch.iinfo(torch.int64).max


class Supports:
    """Collects the supports of N rows, `wants` bool [N] of them."""

    def __init__(self, wants: np.ndarray) -> None:
        self._wants = wants
        self._found: dict[int, np.ndarray] = {}

    def add(self, rows: np.ndarray, logits: Tensor, inside: Tensor, edges: tuple[Tensor, Tensor] | None) -> None:
        """Add the tokens inside `edges` [n] of `rows` [n], which are the rows `inside`, int64 [n], of `logits`.

        None: there are no edges. Tokens of logit -inf are masked. Rows that do not ask are left out.
        """
        wanted = torch.from_numpy(self._wants[rows])
        rows, inside = rows[wanted.numpy()], inside[wanted]
        if not len(rows):
            return
        if edges is None:
            edges = torch.full((len(rows),), -torch.inf), torch.full((len(rows),), _LAST)
        else:
            edges = edges[0][wanted], edges[1][wanted]
        sets, vocab_size = kept_ids(logits, inside, *edges), logits.shape[1]
        ids = sets.ids.numpy()
        for row, (start, end) in zip(rows.tolist(), pairwise(sets.starts.tolist()), strict=True):
            self._found[row] = _ALL if end - start == vocab_size else ids[start:end]

    def finish(self, errors: dict[int, str]) -> dict[int, np.ndarray]:
        """The support of each row that asks and could be drawn: row -> int32 ids, ascending."""
        rows = self._wants.nonzero()[0].tolist()
        return {row: self._found.get(row, _ALL) for row in rows if row not in errors}
