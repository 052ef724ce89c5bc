"""The slot of each sequence's states, and the chunks of a step that read and write them."""

from collections.abc import Iterable, Sequence

import numpy as np

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.kernels.state_chunks import StateChunks


class StateSlots:
    """The slot of each sequence's states, by sequence id: a step names it when it changes."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget the slots of sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._slots.pop(sequence_id, None)

    def chunks(self, scheduled: Sequence[ScheduledSequence], token_starts: np.ndarray) -> StateChunks:
        """The slots that the chunks of a step read and write; they start at `token_starts` int64 [N + 1].

        Raises `ValueError` for a sequence that has no slot.
        """
        sources, counts, ends, slots = [], [0], [], []
        for chunk, start in zip(scheduled, token_starts.tolist(), strict=False):
            move = chunk.state
            if move is None:
                sources.append(self._slot_of(chunk.sequence_id))
            else:
                sources.append(move.source)
                self._slots[chunk.sequence_id] = move.slot
                for num_tokens, slot in move.others:
                    ends.append(start + num_tokens)
                    slots.append(slot)
            ends.append(start + chunk.num_scheduled_tokens)
            slots.append(self._slots[chunk.sequence_id])
            counts.append(len(slots))
        written, behind = np.array(slots, np.int64), np.array(ends, np.int64)
        return StateChunks(token_starts, np.array(sources, np.int64), np.array(counts, np.int64), behind, written)

    def _slot_of(self, sequence_id: int) -> int:
        if sequence_id not in self._slots:
            raise ValueError(f"Sequence {sequence_id} is computed without a slot for its states.")
        return self._slots[sequence_id]
