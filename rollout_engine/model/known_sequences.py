"""What a runner keeps of the sequences it works on, so that a step carries only what changed."""

from collections.abc import Sequence

from rollout_engine.messages import NewSequence, SchedulerOutput
from rollout_engine.model.logit_edits import LogitEdits
from rollout_engine.model.logits_processors import LogitsProcessor
from rollout_engine.model.prompt_logprobs import PromptScorer


class KnownSequences(dict[int, NewSequence]):
    """By id."""

    def __init__(self, vocab_size: int, processors: Sequence[LogitsProcessor], prompts: PromptScorer) -> None:
        super().__init__()
        self._vocab_size, self._processors, self._prompts = vocab_size, processors, prompts
        self._edits: dict[int, LogitEdits] = {}
        """Of the sequences that have any."""

    def note(self, work: SchedulerOutput) -> None:
        """Forget what has finished and learn what is new, prompts too."""
        for sequence_id in work.finished:
            self.pop(sequence_id, None)
            self._edits.pop(sequence_id, None)
            self._prompts.forget(sequence_id)
        for new in work.new:
            self[new.sequence_id] = new
            edits = LogitEdits.of(new, self._processors, self._vocab_size)
            if edits is not None:
                self._edits[new.sequence_id] = edits
        self._prompts.learn(work.new, work.scheduled)

    def edits_of(self, sequences: Sequence[NewSequence], positions: Sequence[int]) -> dict[int, LogitEdits]:
        """By place, of those whose logits are edited where the token at its of `positions` is to be drawn."""
        known = ((row, self._edits.get(s.sequence_id)) for row, s in enumerate(sequences)) if self._edits else ()
        return {row: found for row, found in known if found is not None and found.active_at(positions[row])}
