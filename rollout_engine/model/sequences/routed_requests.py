"""The sequences whose requests ask for routed experts, and the prompts whose experts have not been returned yet."""

from collections.abc import Iterator

from rollout_engine.base.messages import SchedulerOutput


class RoutedRequests:
    """Sequences that ask for routed experts, tracked over the steps of a runner."""

    def __init__(self) -> None:
        self._asking: set[int] = set()
        """Ids of the sequences that ask."""
        self._prompts: dict[int, int] = {}
        """Tokens of the prompts that have not been returned, by the sequence that may complete them."""

    def update(self, work: SchedulerOutput) -> None:
        """Drop finished sequences and add new ones."""
        for sequence_id in work.finished_sequence_ids if self._asking else ():
            self._asking.discard(sequence_id)
            self._prompts.pop(sequence_id, None)
        for new in work.new:
            if new.params.return_routed_experts:
                self._asking.add(new.sequence_id)
                if len(new.token_ids) == new.num_prompt_tokens:
                    self._prompts[new.sequence_id] = new.num_prompt_tokens

    def are_in(self, work: SchedulerOutput) -> bool:
        """Whether the step computes tokens of a sequence that asks."""
        return bool(self._asking) and not self._asking.isdisjoint(row.sequence_id for row in work.scheduled)

    def list_completed(self, work: SchedulerOutput) -> Iterator[tuple[int, int]]:
        """Prompts that the step completes, each once: index of the scheduled sequence, and the prompt's tokens."""
        for index, row in enumerate(work.scheduled if self._prompts else ()):
            if row.num_computed_tokens + row.num_scheduled_tokens == self._prompts.get(row.sequence_id):
                yield index, self._prompts.pop(row.sequence_id)
