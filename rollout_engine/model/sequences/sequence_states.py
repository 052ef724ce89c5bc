"""The sequences that a runner works on, kept between steps so that a step carries only changes."""

from collections.abc import Sequence

from rollout_engine.base.messages import NewSequence, SchedulerOutput
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.logits_processors import LogitsProcessor
from rollout_engine.model.sampling.prompt_logprobs import PromptScorer
from rollout_engine.model.sampling.row_edits import RowEdits


class SequenceStates(dict[int, NewSequence]):
    """Sequences by id, with their logit edits and the prompts to score."""

    def __init__(
        self,
        vocab_size: int,
        processors: Sequence[LogitsProcessor],
        prompts: PromptScorer,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        super().__init__()
        self._vocab_size, self._processors, self._prompts = vocab_size, processors, prompts
        self._grammars = grammars
        self._edits: dict[int, LogitEdits] = {}
        """Logit edits of the sequences that have any."""

    def begin_step(self, work: SchedulerOutput) -> None:
        """Drop finished sequences and add new ones."""
        for sequence_id in work.finished_sequence_ids:
            self.pop(sequence_id, None)
            edits = self._edits.pop(sequence_id, None)
            if edits is not None and edits.grammar is not None:
                edits.grammar.end()
            self._prompts.forget(sequence_id)
        siblings: dict[int, LogitEdits] = {}
        for new in work.new:
            self[new.sequence_id] = new
            sibling = siblings.get(id(new.params))  # the n sequences of a prompt arrive together
            edits = LogitEdits.of(new, self._processors, self._vocab_size, sibling, self._grammars)
            if edits is not None:
                self._edits[new.sequence_id] = siblings[id(new.params)] = edits
        self._prompts.add(work.new, work.scheduled)

    def edits_of(self, sequences: Sequence[NewSequence], positions: Sequence[int]) -> RowEdits:
        """Index into `sequences` -> edits, if the logits of the token at `positions[index]` are edited."""
        found = RowEdits()
        found.lasts = True
        for row, sequence in enumerate(sequences) if self._edits else ():
            edits = self._edits.get(sequence.sequence_id)
            if edits is not None:
                found.lasts &= edits.lasts
                if edits.active_at(positions[row]):
                    found[row] = edits
        return found
