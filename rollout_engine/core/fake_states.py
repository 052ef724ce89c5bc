"""The states of the fake model: a slot holds the digest of the tokens before its position, and is never misread."""

from collections import Counter
from collections.abc import Sequence as Rows
from typing import NamedTuple

from rollout_engine.base.messages import ScheduledSequence, StateMove


class FakeKVError(AssertionError):
    """KV or a state was read that was never written, or that belongs to another context."""


class FakeState(NamedTuple):
    """The content of a slot."""

    digest: int
    """Digest of all tokens before its position."""
    oldest: int
    """Oldest version that computed one of them."""


class FakeStates:
    """A pool of slots. Without one (`num_slots` 0) no row may have a move."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: dict[int, FakeState] = {}

    def resolve(self, rows: Rows[ScheduledSequence], slots: dict[int, int]) -> list[StateMove | None]:
        """The moves of a step: of a row without one, in the slot of its sequence, which `slots` has by sequence id.

        Updates `slots`. Raises `FakeKVError` for slots that are not in the pool, are written twice, or are written by
        one row and read by another.
        """
        moves = [self._resolve(row, slots) for row in rows]
        given = [move for move in moves if move is not None]
        written = Counter(slot for move in given for slot in _list_written(move))
        if twice := [slot for slot, count in written.items() if count > 1]:
            raise FakeKVError(f"state slots {twice} are written twice in one step")
        for move in given:
            if move.source in written and move.source not in _list_written(move):
                raise FakeKVError(f"state slot {move.source} is read by one row and written by another")
        return moves

    def read(self, name: int, move: StateMove, expected: FakeState) -> None:
        """Check that the source holds the state before a row of sequence `name`. Raises `FakeKVError`."""
        if move.source < 0:
            found: FakeState | None = FakeState(0, 2**63)
        else:
            found = self._held.get(move.source)
        if found is None:
            raise FakeKVError(f"sequence {name} reads state slot {move.source}, which was never written")
        if found.digest != expected.digest:
            raise FakeKVError(f"sequence {name} reads the state of another context in slot {move.source}")
        if found.oldest != expected.oldest:
            raise FakeKVError(f"sequence {name}: its state is of version {found.oldest}, its KV of {expected.oldest}")

    def write(self, move: StateMove, num_tokens: int, num_scheduled: int, state: FakeState) -> None:
        """Write the slots of a move behind the first `num_tokens` of its row."""
        for num, slot in [*move.others, (num_scheduled, move.slot)]:
            if num == num_tokens:
                self._held[slot] = state

    def peek(self, slot: int) -> int:
        """The digest in a slot. Raises `FakeKVError` if it was never written."""
        if slot not in self._held:
            raise FakeKVError(f"state slot {slot} is saved, and was never written")
        return self._held[slot].digest

    def put(self, slot: int, state: FakeState) -> None:
        """Write a state that was loaded."""
        self._held[slot] = state

    def clear(self) -> None:
        """Forget all states."""
        self._held.clear()

    def _resolve(self, row: ScheduledSequence, slots: dict[int, int]) -> StateMove | None:
        name, move = row.sequence_id, row.state
        if not self._num_slots:
            if move is not None:
                raise FakeKVError(f"sequence {name} is to move its state, but the model keeps none")
            return None
        if move is None:
            if name not in slots:
                raise FakeKVError(f"sequence {name} is to continue in its state slot, but it has none")
            move = StateMove(slots[name], slots[name])
        if not -1 <= move.source < self._num_slots or not all(0 <= s < self._num_slots for s in _list_written(move)):
            raise FakeKVError(f"sequence {name}: {move} leaves the pool of {self._num_slots} state slots")
        counts = [0, *(num for num, _ in move.others), row.num_scheduled_tokens]
        if sorted(set(counts)) != counts:
            raise FakeKVError(f"sequence {name}: {move} writes behind tokens {counts[1:]}, which do not rise")
        slots[name] = move.slot
        return move


def _list_written(move: StateMove) -> list[int]:
    return [*(slot for _, slot in move.others), move.slot]
