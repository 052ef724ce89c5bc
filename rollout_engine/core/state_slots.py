"""Slots of a pool of states: read, written, shared and kept to be found again, as KV blocks are.

A slot holds the states of one sequence in all layers that keep one, behind one of its tokens. KV of a longer sequence
serves a shorter one; a state holds its own position alone. A row of a step reads one slot and writes one:

    the same       the slot has one reference and is no snapshot: nearly all rows
    another        several samples read the state of their prompt, or the slot is a snapshot that is to be kept
    further ones   snapshots inside a prompt, and a state behind each drafted token: the one behind the last right token
                   is kept

A step holds a reference on each slot that it reads and does not write until all of it is scheduled, so that no row
writes a slot that another one reads.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from rollout_engine.base.messages import ScheduledSequence, StateMove
from rollout_engine.core.block_pool import BlockPool
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.prefix_cache import PrefixBlock, PrefixCache
from rollout_engine.core.request import Sequence


class StateSlots:
    """Every change of a sequence's `state_slot` and `state_writes` happens here, over one pool and one prefix cache.

    A snapshot's identity is that of the prefix that ends at its position: of its last block, or of a tail.
    """

    def __init__(self, config: CoreConfig) -> None:
        self._pool = BlockPool(config.num_state_slots)
        self._snapshots = PrefixCache()
        self._block_size, self._interval = config.block_size, config.state_interval
        num_spare = config.num_state_slots - config.max_num_seqs - 1
        self._num_spare = num_spare if config.enable_prefix_caching else 0
        """Most slots that are held for snapshots and drafts; live sequences have all others."""
        self._num_writes = 0
        """Length of all `state_writes`."""
        self._read: list[int] = []
        """Slots that the step being scheduled reads and does not write, with a reference each."""

    @property
    def num_free(self) -> int:
        """Slots without a reference, snapshots included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Slots referenced by live requests / all slots."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    @property
    def num_snapshots(self) -> int:
        """States that can be found again."""
        return self._snapshots.num_known

    @property
    def takes_snapshots(self) -> bool:
        """Whether states inside a prompt are kept: there are more slots than live sequences may need."""
        return self._num_spare > 0

    def num_missing(self, sequence: Sequence) -> int:
        """Free slots that the next row of `sequence` takes, 0 or 1.

        A snapshot that it alone reads is overwritten if no slot can be spared, so nothing is missing then.
        """
        slot = sequence.state_slot
        if slot < 0 or self._pool.is_shared(slot):
            return 1
        return int(self._snapshots.is_known(slot) and self._can_spare())

    def move(self, sequence: Sequence) -> StateMove | None:
        """Give the next row a slot that it may write; returns the move, or None if the runner continues in its slot."""
        source = sequence.state_slot
        if self.num_missing(sequence):
            sequence.state_slot = self._allocate()
            if source >= 0:
                self._read.append(source)
        else:
            self._snapshots.forget(source)
        if source == sequence.state_slot == sequence.sent_state_slot:
            return None
        sequence.sent_state_slot = sequence.state_slot
        return StateMove(source, sequence.state_slot)

    def finish_scheduling(self, scheduled: Rows[ScheduledSequence], sequences: Rows[Sequence]) -> None:
        """Add snapshots to the rows of a step, and release the slots that it reads alone: later steps may write them.

        Snapshots are added last, so that they take no slot that a row of this step needs.
        """
        if self.takes_snapshots:
            for row, sequence in zip(scheduled, sequences, strict=True):
                if row.num_computed_tokens < sequence.num_prompt_tokens:
                    self._add_snapshots(row, sequence)
        for slot in self._read:
            self._release(slot)
        self._read.clear()

    def add_drafts(self, row: ScheduledSequence, sequence: Sequence) -> None:
        """Give each token of a row with drafts a slot for the state behind it; the caller has checked `num_free`."""
        move = row.state or StateMove(sequence.state_slot, sequence.state_slot)
        others = [(num, self._allocate()) for num in range(1, len(row.draft_token_ids) + 1)]
        row.state = StateMove(move.source, move.slot, others)
        start = row.num_computed_tokens
        sequence.state_writes = tuple((start + num, slot) for num, slot in others)
        self._num_writes += len(others)

    def keep_drafted(self, sequence: Sequence) -> None:
        """Continue from the state behind the last right token of a completed row with drafts; release the others."""
        for position, slot in sequence.state_writes:
            if position == sequence.num_computed_tokens:
                slot, sequence.state_slot = sequence.state_slot, slot
                sequence.num_writable_tokens = position  # so that the next row names the slot
            self._release(slot)
        self._num_writes -= len(sequence.state_writes)
        sequence.state_writes = ()

    def publish(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """Let others find the snapshots that completed steps wrote up to token `end`, if the prefix there is known.

        Returns the slots and positions of those. No step that was scheduled by now writes the slots again.
        """
        found, done = [], [each for each in sequence.state_writes if each[0] <= end]
        for position, slot in done:
            index = position // self._block_size - 1
            if index < len(sequence.prefix):
                self._snapshots.publish(slot, sequence.prefix[index])
                found.append((slot, position))
            self._release(slot)
        sequence.state_writes = sequence.state_writes[len(done) :]
        self._num_writes -= len(done)
        return found

    def publish_live(self, sequence: Sequence, identity: PrefixBlock) -> None:
        """Let others find the state of a sequence that is about to lose its slot, behind the tokens of `identity`."""
        is_tail = identity.num_tokens < self._block_size
        (self._snapshots.publish_tail if is_tail else self._snapshots.publish)(sequence.state_slot, identity)

    def find(self, identities: Rows[PrefixBlock]) -> tuple[int, int]:
        """The longest snapshot in the prefix that consists of these blocks: its slot and its number of tokens.

        (-1, 0) if there is none. The last of them may be a tail.
        """
        for index in range(len(identities) - 1, -1, -1):
            found = self._snapshots.find(identities[index]) or self._snapshots.find_tail(identities[index])
            if found is not None:
                return found[0], index * self._block_size + found[1].num_tokens
        return -1, 0

    def next_snapshot(self, sequence: Sequence, start: int) -> int:
        """The first position behind `start` at which a snapshot of the prompt is to be taken; 0 if there is none."""
        wanted = (self.next_multiple(start), self._last_boundary(sequence))
        return min((each for each in wanted if start < each <= sequence.num_prompt_tokens), default=0)

    def next_multiple(self, start: int) -> int:
        """The first multiple of the interval of snapshots behind `start`."""
        return (start // self._interval + 1) * self._interval

    def attach(self, sequence: Sequence, slot: int) -> None:
        """Let `sequence` begin with the state in a snapshot."""
        self._pool.share(slot)
        sequence.state_slot = slot

    def attach_new(self, sequence: Sequence, identity: PrefixBlock) -> int:
        """Let `sequence` begin with a state that the step being scheduled fills in; returns its slot.

        Others find it as a snapshot behind `identity`, if a slot can be spared.
        """
        self.release(sequence)
        sequence.state_slot = self._allocate()
        if self._can_spare():
            self._snapshots.publish(sequence.state_slot, identity)
        return sequence.state_slot

    def fork(self, leader: Sequence, child: Sequence) -> None:
        """Let `child` begin with the state that `leader` has now."""
        self._pool.share(leader.state_slot)
        child.state_slot = leader.state_slot

    def release(self, sequence: Sequence) -> None:
        """Drop all references of a sequence."""
        for slot in (sequence.state_slot, *(slot for _, slot in sequence.state_writes)):
            if slot >= 0:
                self._release(slot)
        self._num_writes -= len(sequence.state_writes)
        sequence.state_slot = sequence.sent_state_slot = -1
        sequence.state_writes = ()

    def unpublish(self, sequence: Sequence) -> None:
        """Remove the snapshots of a sequence's prefix: they may be wrong."""
        self.forget_behind(sequence.prefix, sequence)

    def forget_behind(self, identities: Iterable[PrefixBlock], sequence: Sequence) -> None:
        """Remove the snapshots behind these blocks, and the one that a sequence has."""
        for identity in identities:
            if (found := self._snapshots.find(identity)) is not None:
                self._snapshots.forget(found[0])
        self._snapshots.forget(sequence.state_slot)

    def clear(self) -> None:
        """Forget every snapshot."""
        self._snapshots.clear()
        self._pool.forget_contents()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount references."""
        sequences = list(sequences)
        assert not self._read, "a slot is held by a step that was scheduled"
        writes = [[slot for _, slot in sequence.state_writes] for sequence in sequences]
        assert self._num_writes == sum(map(len, writes)), "slots of snapshots and drafts were miscounted"
        live = [[sequence.state_slot] for sequence in sequences if sequence.state_slot >= 0]
        self._pool.check_integrity(live + writes)
        self._snapshots.check_integrity()
        for sequence in sequences:
            name, has_state = sequence.sequence_id, sequence.state_slot >= 0
            assert has_state == (sequence.num_computed_tokens > 0), f"{name}: computed tokens and no state, or reverse"
            writes_in_place = sequence.num_writable_tokens > sequence.num_computed_tokens > 0
            assert not writes_in_place or self._is_own(sequence), f"{name}: a state that others read would be written"

    def _is_own(self, sequence: Sequence) -> bool:
        slot = sequence.state_slot
        return (
            slot == sequence.sent_state_slot and not self._pool.is_shared(slot) and not self._snapshots.is_known(slot)
        )

    def _add_snapshots(self, row: ScheduledSequence, sequence: Sequence) -> None:
        start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        assert not row.draft_token_ids, "a row of a prompt has drafts, whose states would not be written"
        writes: list[tuple[int, int]] = []
        for position in self._positions(sequence, start, end):
            if not self._can_spare():
                break
            if position == end:  # its own slot is the snapshot: its next row, in another block, writes another
                slot = sequence.state_slot
                self._pool.share(slot)
            else:
                slot = self._allocate()
            writes.append((position, slot))
            self._num_writes += 1
        if not writes:
            return
        writes.reverse()
        sequence.state_writes += tuple(writes)
        others = [(position - start, slot) for position, slot in writes if position < end]
        if others:
            move = row.state or StateMove(sequence.state_slot, sequence.state_slot)
            row.state = StateMove(move.source, move.slot, others)

    def _positions(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Positions in (start, end] at which snapshots are to be taken, the last first: it serves most prompts."""
        highest = min(end, sequence.num_prompt_tokens) // self._interval * self._interval
        found = set(range(highest, start, -self._interval))
        last = self._last_boundary(sequence)
        return sorted(found | {last} if start < last <= end else found, reverse=True)

    def _last_boundary(self, sequence: Sequence) -> int:
        """The end of the last full block before the prompt's last token: the same prompt begins there the next time."""
        return (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _can_spare(self) -> bool:
        """Whether a snapshot may take a slot."""
        return self._pool.num_free > 0 and self._num_writes + len(self._read) < self._num_spare

    def _allocate(self) -> int:
        slot = self._pool.allocate()
        self._snapshots.forget(slot)
        return slot

    def _release(self, slot: int) -> None:
        self._pool.release(slot, worth_keeping=self._snapshots.is_known(slot))
