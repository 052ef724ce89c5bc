"""The logit edits of a step's rows, and the masks of the rows that grammars restrict."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from rollout_engine.grammars.masks import Asked, GrammarBatch, forbid
from rollout_engine.model.sampling.logit_edits import LogitEdits


class RowEdits(dict[int, LogitEdits]):
    """The logit edits of a step's rows, by row; of every step that draws from the same sequences if they last."""

    lasts = False
    """Whether the same rows are edited whatever the positions of their tokens."""

    @cached_property
    def restricted(self) -> list[int]:
        """The rows that a grammar alone edits."""
        return [row for row, each in self.items() if not each.edits_beside_grammar]

    def is_restricted(self, num_rows: int) -> np.ndarray:
        """bool [N]: the rows `restricted`."""
        found = np.zeros(num_rows, np.bool_)
        if self.restricted:
            found[self.restricted] = True
        return found

    def tries_first(self, truncates: np.ndarray) -> np.ndarray:
        """bool [N]: the restricted rows that are drawn as if they were not, and again only if the grammar refuses.

        `truncates`: bool [N], rows that rules truncate, as far as they keep allowed tokens alone.
        """
        tries: np.ndarray = self.is_restricted(len(truncates)) & ~truncates
        return tries

    @cached_property
    def masked(self) -> "MaskedRows | None":
        """The restricted rows that are drawn without an edited copy; None without any."""
        found = {row: self[row] for row in self.restricted if row not in self.copied}
        return MaskedRows(found) if found else None

    @cached_property
    def copied(self) -> dict[int, LogitEdits]:
        """The other rows, drawn from an edited copy: it gives supports, and the log-probs of mode "processed"."""
        return {
            row: each
            for row, each in self.items()
            if each.edits_beside_grammar
            or each.sequence.params.logprobs_mode == "processed"
            or each.sequence.params.return_support
        }


class MaskedRows:
    """M rows that grammars restrict."""

    def __init__(self, edits: Mapping[int, LogitEdits]) -> None:
        """`edits`: row -> its edits, each with a grammar."""
        self._states = {row: each.grammar for row, each in edits.items() if each.grammar is not None}
        asked: dict[int, Asked] = {}
        for row, state in self._states.items():
            each, known = edits[row], asked.get(id(state))
            if known is None or len(known.draft) < len(each.draft):  # drafts of one sequence begin alike
                asked[id(state)] = Asked(state, each.drawn_token_ids, each.draft)
        self.batch = GrammarBatch(list(asked.values()))
        first_of = dict(zip(asked, self.batch.firsts, strict=True))
        self.rows = np.fromiter(self._states, np.int64, len(edits))
        """int64 [M]."""
        places = (first_of[id(state)] + len(edits[row].draft) for row, state in self._states.items())
        self.places = np.fromiter(places, np.int64, len(edits))
        """int64 [M], the place of each row in the batch."""
        self.row_at = np.full(self.batch.num_places, -1)
        """int64 [places], the row of each place; -1 for none."""
        self.row_at[self.places] = self.rows

    def masks(self, tried: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Masks of `GrammarBatch.masks`, and bool [M]: whether a row's is filled.

        `tried`: a token for each row, int64 [M], negative for none.
        """
        if tried is not None:
            given, tried = tried, np.full(self.batch.num_places, -1)
            tried[self.places] = given
        masks, is_filled = self.batch.masks(tried)
        return masks, is_filled[self.places]

    def failures(self) -> dict[int, str]:
        """Row -> why it cannot be sampled."""
        if not self.batch.has_failed:
            return {}
        return {
            row: f"structured_outputs: the grammar cannot go on: {state.failure}."
            for row, state in self._states.items()
            if state.failure is not None
        }


def edit(logits: Tensor, edits: Sequence[LogitEdits]) -> dict[int, str]:
    """Edit all rows of `logits` float32 [N, V] in place. Returns row -> why it cannot be sampled."""
    failures: dict[int, str] = {}
    for row, each in enumerate(edits):
        if each.edits_beside_grammar and (failure := each.apply(logits[row])) is not None:
            failures[row] = failure
    restricted = {row: each for row, each in enumerate(edits) if each.grammar is not None and row not in failures}
    if not restricted:
        return failures
    masked = MaskedRows(restricted)
    masks, is_filled = masked.masks()
    if is_filled.any():
        rows = masked.rows[is_filled]
        some = logits[rows]
        forbid(some, masks[masked.places[is_filled]])
        logits[rows] = some
    return failures | masked.failures()
