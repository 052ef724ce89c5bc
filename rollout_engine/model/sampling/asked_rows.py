"""The rows of a step's flat batch whose logits are asked for."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_engine.model.sampling.draft_draws import rows_up_to


class AskedRows(NamedTuple):
    """The rows whose logits a step needs, and which of them are drawn from."""

    logit_rows: np.ndarray
    """int64: rows of the flat batch; first the distinct rows to draw from, then those of prompts."""
    drawn_rows: np.ndarray
    """int64 [S]: the distinct row of each sample; the first one of several, if tokens were drafted."""
    num_drawn: int
    """Distinct rows to draw from."""

    @property
    def flat_rows(self) -> np.ndarray:
        """int64 [S]: the row of the flat batch behind which each sample is drawn, or its first."""
        rows: np.ndarray = self.logit_rows[self.drawn_rows]
        return rows

    @classmethod
    def of(
        cls, chunks: Sequence[int], token_starts: np.ndarray, num_drafted: np.ndarray | None, prompt_rows: list[int]
    ) -> "AskedRows":
        """`chunks`: those that samples are drawn behind; `num_drafted`: drafted tokens of each chunk; None: none."""
        drawn = np.array(chunks, np.int64)
        if num_drafted is None and not prompt_rows and (drawn[1:] > drawn[:-1]).all():  # most steps
            return cls(token_starts[1:][drawn] - 1, np.arange(len(drawn)), len(drawn))
        distinct = list(dict.fromkeys(chunks))  # the n samples of a prompt draw from the same row
        rows = token_starts[1:][distinct] - 1
        firsts = range(len(distinct))
        if num_drafted is not None:
            rows, first_rows = rows_up_to(rows, num_drafted[distinct])
            firsts = first_rows.tolist()
        first_of = dict(zip(distinct, firsts, strict=True))
        return cls(
            logit_rows=np.append(rows, prompt_rows).astype(np.int64) if prompt_rows else rows.astype(np.int64),
            drawn_rows=np.array([first_of[chunk] for chunk in chunks], np.int64),
            num_drawn=len(rows),
        )

    def takes_all_in_order(self, count: int) -> bool:
        """Whether one token is drawn from each of `count` rows of logits, and nothing else is asked for."""
        every = np.arange(count)
        return np.array_equal(self.logit_rows, every) and np.array_equal(self.drawn_rows, every)
