"""Divides sequences among the steps that fill a pipe of stages.

    stage 0   A1  B1  A2  B2  A3          each step is one micro-batch; A2 needs the tokens of A1, which the
    stage 1       A1  B1  A2  B2          last stage draws, so no sequence is in two steps that draw for it

A step gets its part of all rows and of all tokens that are in flight or could be computed now, so that steps become
equally long, whatever they were before. Chunks of one prompt follow each other without a wait: they draw nothing.
"""

from collections.abc import Sequence as Rows
from itertools import islice

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.request import Sequence
from rollout_engine.core.step import Step

_LEAST_TOKENS = 64
"""Tokens that a step may have at least: shorter chunks of prompts cost more than they fill of the pipe."""


class MicroBatches:
    """The bounds of the step that is being scheduled; with one stage only that of its tokens."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self.are_several = config.num_stages > 1
        """Whether sequences are divided among steps."""
        self._most_rows = 0
        self._rows: Rows[ScheduledSequence] = ()

    def begin(self, step: Step, running: Rows[Sequence], *others: Rows[Sequence]) -> int:
        """Begin a step. Returns the tokens that it may have.

        `others`: queues of sequences that may become running ones.
        """
        if not self.are_several:
            return self._config.max_num_batched_tokens
        counts = [_num_computable(sequence) for sequence in running]
        for queue in others:
            room = max(0, self._config.max_num_seqs - len(counts))
            counts += [_num_computable(sequence) for sequence in islice(queue, room)]
        self._rows, self._most_rows = step.work.scheduled, self._part(len(counts))
        return min(self._config.max_num_batched_tokens, max(_LEAST_TOKENS, self._part(sum(counts))))

    @property
    def is_full(self) -> bool:
        """Whether the step has its part of all rows."""
        return self.are_several and len(self._rows) >= self._most_rows

    def leaves_out(self, sequence: Sequence) -> bool:
        """Whether the step cannot have a sequence: it is full, or a step in flight draws the sequence's next token."""
        return sequence.num_pending_tokens > 0 or self.is_full

    def first_ready(self, parked: Rows[Sequence]) -> list[Sequence]:
        """The first parked sequence, with several stages the first that awaits no token, in a list; or none."""
        if not self.are_several:
            return list(parked[:1])
        return list(islice((sequence for sequence in parked if not sequence.num_pending_tokens), 1))

    def _part(self, count: int) -> int:
        """One step's part of a number of rows or tokens: one at least."""
        return max(1, -(-count // self._config.num_stages))


def _num_computable(sequence: Sequence) -> int:
    """Tokens of a sequence that a step in flight, or the next one, may compute: one of a sequence that decodes."""
    return max(1, sequence.num_tokens - sequence.num_computed_tokens)
