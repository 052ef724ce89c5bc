"""Sends steps to the stages before rank 0's, as soon as they are scheduled: these compute while rank 0 draws.

    announce(step 7) ──> stage 0 ── stage 1 ──> rank 0's inbox      steps 5 and 6 are drawn meanwhile

A step goes with the tokens of its flat batch. Its sequences are in no other step that draws for them, so their
tokens are known: lists that rank 0's runner appends to.
"""

from collections.abc import Callable

import numpy as np

from rollout_engine.base.messages import SchedulerOutput
from rollout_engine.model.ranks.pipe import Pipe
from rollout_engine.model.ranks.pipe_memory import num_places


class StepFeed:
    """The forwards that are on their way to rank 0, whose `pipe` this is.

    `send` gives a step to the ranks of all other stages: the work, its token ids, and its serial.
    """

    def __init__(self, pipe: Pipe, send: Callable[[SchedulerOutput, np.ndarray, int], None]) -> None:
        self._pipe, self._send = pipe, send
        self._token_ids: dict[int, list[int]] = {}
        """By sequence, the list that rank 0's runner has, too."""
        self._num_booked = 0
        self._pending: set[int] = set()
        """Serials of steps that rank 0 may still compute."""

    def announce(self, work: SchedulerOutput) -> int:
        """Have the other stages compute a step. Returns its serial, for `begin`; -1 if it computes nothing.

        Raises `BrokenTurnsError` if a stage has ended or failed.
        """
        for sequence_id in work.finished_sequence_ids:
            self._token_ids.pop(sequence_id, None)
        self._token_ids.update((new.sequence_id, new.token_ids) for new in work.new)
        serial = -1
        if work.scheduled:
            serial = self.book()
            self._pending.add(serial)
        self._send(work, self._flat_tokens(work), serial)
        return serial

    def begin(self, serial: int) -> None:
        """Rank 0 computes this step now. Steps that were announced before it are not asked for any more."""
        if serial >= 0:
            self._pipe.serial = serial
            self._pending = {each for each in self._pending if each > serial}

    def begin_other(self) -> int:
        """Rank 0 computes a forward of no step now, such as a score's; returns its serial.

        It has computed all steps that were announced, but for those behind one that failed, which it asks for no more.
        """
        self._pending.clear()
        self._pipe.serial = self.book()
        return self._pipe.serial

    def book(self) -> int:
        """The serial of a further forward, which every stage computes; its place on each belt is free."""
        assert self._pipe.inbox is not None, "rank 0 is of the last stage"
        serial, self._num_booked = self._num_booked, self._num_booked + 1
        before = serial - num_places(self._pipe.num_stages)
        assert all(each > before for each in self._pending), "more forwards are in flight than belts have places"
        self._pipe.inbox.wait_for(before)
        return serial

    def drain(self) -> None:
        """Wait until all other stages have computed the steps that were announced."""
        assert self._pipe.inbox is not None, "rank 0 is of the last stage"
        self._pipe.inbox.wait_for(self._num_booked - 1)

    def _flat_tokens(self, work: SchedulerOutput) -> np.ndarray:
        """int64 [T]: the tokens of the flat batch."""
        found: list[int] = []
        for chunk in work.scheduled:
            start = chunk.num_computed_tokens
            tokens = self._token_ids[chunk.sequence_id][start : start + chunk.num_scheduled_tokens]
            assert len(tokens) == chunk.num_scheduled_tokens, "a token is scheduled before it was drawn"
            found += tokens
        return np.array(found, np.int64)
