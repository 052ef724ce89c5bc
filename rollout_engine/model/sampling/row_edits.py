"""The logit edits of a step's rows, and the masks of the rows that grammars restrict."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from rollout_engine.grammars.masks import Asked, Masks, forbid
from rollout_engine.model.sampling.logit_edits import LogitEdits


class RowEdits(dict[int, LogitEdits]):
    """Row -> its edits. One that `lasts` serves every step that draws from the same sequences."""

    lasts = False
    """Whether the same rows are edited whatever the positions of their tokens."""

    @cached_property
    def masked(self) -> "MaskedRows | None":
        """The rows that are masked in the draw: a grammar alone edits them; None without any.

        Rows whose log-probs are processed are not among them: their distribution is told from an edited copy.
        """
        found = {row: each for row, each in self.items() if row not in self.copied}
        return MaskedRows(found) if found else None

    @cached_property
    def copied(self) -> dict[int, LogitEdits]:
        """The other rows, which are drawn from an edited copy."""
        return {
            row: each
            for row, each in self.items()
            if each.edits_beside_grammar or each.sequence.params.logprobs_mode == "processed"
        }


class MaskedRows:
    """M rows that grammars restrict, and the masks of the tokens that they allow next."""

    def __init__(self, edits: Mapping[int, LogitEdits]) -> None:
        """`edits`: row -> its edits, each with a grammar."""
        self._states = {row: each.grammar for row, each in edits.items() if each.grammar is not None}
        asked: dict[int, Asked] = {}
        for row, state in self._states.items():
            each, known = edits[row], asked.get(id(state))
            if known is None or len(known.draft) < len(each.draft):  # drafts of one sequence begin alike
                asked[id(state)] = Asked(state, each.drawn_token_ids, each.draft)
        self._masks = Masks(list(asked.values()))
        first_of = dict(zip(asked, self._masks.firsts, strict=True))
        self.rows = np.fromiter(self._states, np.int64, len(edits))
        """int64 [M]."""
        places = (first_of[id(state)] + len(edits[row].draft) for row, state in self._states.items())
        self.places = np.fromiter(places, np.int64, len(edits))
        """int64 [M], which of the masks is a row's."""

    def fill(self) -> tuple[np.ndarray, dict[int, str]]:
        """Masks of `Masks.fill`, and row -> why it cannot be sampled."""
        masks = self._masks.fill()
        failures = {
            row: f"structured_outputs: the grammar cannot go on: {state.failure}."
            for row, state in self._states.items()
            if state.failure is not None
        }
        return masks, failures


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
    masks, others = masked.fill()
    some = logits[masked.rows]
    forbid(some, masks[masked.places])
    logits[masked.rows] = some
    return failures | others
