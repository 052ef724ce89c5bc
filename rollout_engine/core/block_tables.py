"""Block tables of sequences: grow, share, copy on write, publish, release; and their slots of states, if any."""

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Rows

from rollout_engine.base.messages import ScheduledSequence, StateMove
from rollout_engine.base.pictures import start_between_pictures
from rollout_engine.core.block_pool import BlockPool
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.prefix_cache import PrefixBlock, PrefixCache
from rollout_engine.core.request import Sequence
from rollout_engine.core.state_slots import StateSlots
from rollout_engine.core.table_checks import check_table
from rollout_engine.core.tier import Tier


class BlockTables:
    """Every change of a sequence's `block_ids` happens here, over one pool and one prefix cache.

    If the model keeps states, a sequence continues from position p only with KV of the tokens before p and a state at
    p: `states` has those, and each method here cares for both.
    """

    def __init__(self, config: CoreConfig, policy_version: int, tier: Tier | None = None) -> None:
        """`tier`: blocks outside of the pool; None: there are none."""
        self.tier = tier
        self.policy_version = policy_version
        """Policy version that computes KV now; only its blocks are published and found."""
        self._config, self.block_size = config, config.block_size
        self.caching = config.enable_prefix_caching
        """Whether blocks are published and found again."""
        self._pool = BlockPool(config.num_blocks)
        self._cache = PrefixCache()
        self.states = StateSlots(config) if config.num_state_slots else None
        """Slots of the states; None: the model keeps none."""
        self._being_computed: set[bytes] = set()
        """Hashes of blocks that were looked up without a match, and that the searching sequence computes itself."""

    @property
    def usage(self) -> float:
        """Blocks referenced by live requests / all blocks."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    @property
    def state_usage(self) -> float:
        """Slots of states referenced by live requests / all slots; 0.0 if the model keeps none."""
        return 0.0 if self.states is None else self.states.usage

    @property
    def num_state_snapshots(self) -> int:
        """States that can be found again."""
        return 0 if self.states is None else self.states.num_snapshots

    def fits(self, sequence: Sequence, end: int) -> bool:
        """Whether there is room to compute `sequence` up to token `end`, its copy on write included."""
        if self.states is not None and self.states.num_missing(sequence) > self.states.num_free:
            return False
        return self._num_missing(sequence, end) <= self._pool.num_free

    def fit_together(self, sequences: Rows[Sequence]) -> bool:
        """Whether there is room to compute all of these to their last tokens."""
        states = self.states
        if states is not None and sum(map(states.num_missing, sequences)) > states.num_free:
            return False
        return sum(self._num_missing(each, each.num_tokens) for each in sequences) <= self._pool.num_free

    def extend(self, sequence: Sequence, end: int) -> tuple[list[tuple[int, int]], StateMove | None]:
        """Give every position below `end` a block of its own to be written, and the state behind it a slot.

        Returns (source, destination) copies of blocks, and the move of its state that the next row has to name.
        """
        copies = []
        if self._writes_shared_block(sequence) or self._spares_full_block(sequence, end):
            index = sequence.num_computed_tokens // self.block_size
            source, destination = sequence.block_ids[index], self._allocate()
            sequence.block_ids[index] = destination
            self._release(source)
            sequence.num_sent_blocks = min(sequence.num_sent_blocks, index)
            copies.append((source, destination))
        elif sequence.num_computed_tokens % self.block_size:
            self._cache.forget(sequence.block_ids[sequence.num_computed_tokens // self.block_size])  # if it was a tail
        while len(sequence.block_ids) * self.block_size < end:
            sequence.block_ids.append(self._allocate())
        sequence.num_writable_tokens = len(sequence.block_ids) * self.block_size
        return copies, None if self.states is None else self.states.move(sequence)

    def attach_prefix(self, sequence: Sequence) -> bool:
        """Start `sequence` on the known blocks of its prefix; at least one token is left to compute.

        It begins inside no picture that must not be split: then known blocks serve it up to the picture's start.
        Returns False, and does nothing, if a sequence with the same prefix computes the next of its blocks now.
        """
        if not self.caching:
            return True
        assert not sequence.block_ids, f"{sequence.sequence_id} already has blocks"
        if self.states is not None:
            return self._attach_state(self.states, sequence)
        end = sequence.num_tokens - 1
        while (len(sequence.prefix) + 1) * self.block_size <= end:
            wanted = self._identify(sequence, len(sequence.prefix))
            found = self._cache.find(wanted)
            if found is None:
                if wanted.hash in self._being_computed:
                    self.release(sequence)
                    return False
                self._promise(sequence, wanted)
                break
            self._attach(sequence, *found)
            sequence.prefix.append(found[1])
            self._note(sequence, len(sequence.prefix) - 1)
        found = self._cache.find_tail(self._identify(sequence, len(sequence.prefix), end))
        if found is not None:
            self._attach(sequence, *found)
        self._leave_picture(sequence)
        return True

    def publish(self, sequence: Sequence, end: int) -> None:
        """Publish newly filled blocks below token `end`, unless the sequence has KV of an older version."""
        num_full = end // self.block_size
        if len(sequence.prefix) != num_full and self.caching and sequence.kv_min_version == self.policy_version:
            for index in range(len(sequence.prefix), num_full):
                identity = self._identify(sequence, index)
                self._cache.publish(sequence.block_ids[index], identity)
                known = self._cache.find(identity)
                sequence.prefix.append(known[1] if known else identity)
                if identity.hash == sequence.looked_up_in_vain:
                    self._is_computed(sequence)
                self._note(sequence, index)
        for slot, position in () if self.states is None else self.states.publish(sequence, end):
            if self.tier is not None:
                identity = sequence.prefix[position // self.block_size - 1]
                self.tier.note_state(slot, identity, sequence.request)

    def publish_tail(self, sequence: Sequence) -> None:
        """Publish, for a next turn, the last block of a sequence whose last token was just sampled, and has no KV.

        And its state, if that is behind the same tokens: no step in flight has computed the last one.
        """
        end = len(sequence.token_ids) - 1
        index, num_tokens = divmod(end, self.block_size)
        is_known = len(sequence.prefix) == index and sequence.kv_min_version == self.policy_version
        if not end or not is_known or not self.caching:
            return
        if num_tokens:
            identity = self._identify(sequence, index, end)
            self._cache.publish_tail(sequence.block_ids[index], identity)
        else:
            identity = sequence.prefix[-1]
        if self.states is not None and sequence.num_computed_tokens == end:
            self.states.publish_live(sequence, identity)

    def finish_scheduling(self, scheduled: Rows[ScheduledSequence], sequences: Rows[Sequence]) -> None:
        """Complete the rows of a step, once all are scheduled."""
        if self.states is not None:
            self.states.finish_scheduling(scheduled, sequences)

    @property
    def max_drafts(self) -> int:
        """Most tokens that may be drafted for one more row of the step that is being scheduled, as states limit it."""
        return sys.maxsize if self.states is None else self.states.num_free

    def add_drafts(self, row: ScheduledSequence, sequence: Sequence) -> None:
        """Prepare a row to keep the tokens up to any of its drafts, at most `max_drafts` of them."""
        if self.states is not None:
            self.states.add_drafts(row, sequence)

    def keep_drafted(self, sequence: Sequence) -> None:
        """Drop the tokens of a completed row behind its last right draft, which are beyond `num_computed_tokens`."""
        if self.states is not None:
            self.states.keep_drafted(sequence)

    def fork(self, leader: Sequence, child: Sequence) -> None:
        """Let `child` continue from everything that `leader` has computed, on the same blocks."""
        for block in leader.block_ids:
            self._pool.share(block)
        child.block_ids = leader.block_ids.copy()
        child.prefix = leader.prefix.copy()
        child.num_computed_tokens = leader.num_computed_tokens
        leader.num_writable_tokens = child.num_writable_tokens = leader.num_computed_tokens
        child.kv_min_version = leader.kv_min_version
        if self.states is not None:
            self.states.fork(leader, child)

    def release(self, sequence: Sequence) -> None:
        """Drop all references of a sequence, the tail first, so that the head of a prefix stays cached longest."""
        for block in reversed(sequence.block_ids):
            self._release(block)
        if self.states is not None:
            self.states.release(sequence)
        self._is_computed(sequence)
        sequence.block_ids = []
        sequence.prefix = []
        sequence.num_computed_tokens = sequence.num_writable_tokens = sequence.num_sent_blocks = 0
        sequence.kv_min_version = None

    def unpublish(self, sequence: Sequence) -> None:
        """Remove the blocks of a sequence from the prefix cache: their KV may be wrong."""
        for block in sequence.block_ids:
            self._cache.forget(block)
        if self.states is not None:
            self.states.unpublish(sequence)

    def clear_cache(self, *, with_tier: bool = False) -> None:
        """Forget every known prefix. `with_tier`: also outside of the pool."""
        if with_tier and self.tier is not None:
            self.tier.reset()
        self._cache.clear()
        self._pool.forget_contents()
        if self.states is not None:
            self.states.clear()

    def start_version(self, version: int) -> None:
        """From now on KV is of this policy version; that of earlier ones is not found again."""
        self.policy_version = version
        self._pool.forget_contents()
        if self.states is not None:
            self.states.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount references and compare every table with the claims of its sequence."""
        sequences = list(sequences)
        assert self._being_computed == {s.looked_up_in_vain for s in sequences} - {b""}, "a block is computed by nobody"
        self._pool.check_integrity(sequence.block_ids for sequence in sequences)
        self._cache.check_integrity()
        for sequence in sequences:
            check_table(sequence, self.block_size, self._pool.is_shared)
        if self.states is not None:
            self.states.check_integrity(sequences)

    def _num_missing(self, sequence: Sequence, end: int) -> int:
        """Free blocks needed to compute `sequence` up to token `end`, its copy on write included."""
        return -(-end // self.block_size) - len(sequence.block_ids) + self._writes_shared_block(sequence)

    def _attach_state(self, states: StateSlots, sequence: Sequence) -> bool:
        """Start `sequence` on the longest prefix that has known blocks and a snapshot at its end.

        That may be inside a full block: then it writes there as into a tail. It waits only for a snapshot of its own
        prefix that another sequence is about to take: KV alone would not help it.
        """
        end = sequence.num_tokens - 1
        blocks: list[int] = []
        while (len(sequence.prefix) + 1) * self.block_size <= end:
            found = self._cache.find(self._identify(sequence, len(sequence.prefix)))
            if found is None:
                break
            blocks.append(found[0])
            sequence.prefix.append(found[1])
        known = sequence.prefix.copy()
        tail = self._cache.find_tail(self._identify(sequence, len(known), end))
        if tail is not None:
            blocks.append(tail[0])
            known.append(tail[1])
        slot, num_tokens = states.find(known)
        if states.takes_snapshots and not self._promise_snapshot(states, sequence, num_tokens):
            self.release(sequence)
            return False
        del sequence.prefix[num_tokens // self.block_size :]
        if slot >= 0:
            states.attach(sequence, slot)
            sequence.block_ids = blocks[: -(-num_tokens // self.block_size)]
            for block in sequence.block_ids:
                self._pool.share(block)
            for index in range(len(sequence.prefix)):
                self._note(sequence, index)
            sequence.num_computed_tokens = num_tokens
            sequence.kv_min_version = self.policy_version
        return True

    def _promise_snapshot(self, states: StateSlots, sequence: Sequence, start: int) -> bool:
        """Promise the first snapshot behind `start` to others; False if another sequence has promised one that helps.

        Appends identities of blocks to `sequence.prefix`.
        """
        wanted, end = states.next_snapshot(sequence, start), sequence.num_tokens - 1
        helpful = min(states.next_multiple(start), end) if self._being_computed else 0
        while (len(sequence.prefix) + 1) * self.block_size <= max(wanted, helpful):
            sequence.prefix.append(self._identify(sequence, len(sequence.prefix)))
        for identity in sequence.prefix[start // self.block_size : helpful // self.block_size]:
            if identity.hash in self._being_computed:
                return False
        if wanted:
            promised = sequence.prefix[wanted // self.block_size - 1]
            if promised.hash not in self._being_computed:
                self._promise(sequence, promised)
        return True

    def _allocate(self) -> int:
        block = self._pool.allocate()
        self._cache.forget(block)
        return block

    def _release(self, block: int) -> None:
        worth_keeping = self._cache.holds(block, self.policy_version)
        self._pool.release(block, worth_keeping=worth_keeping)

    def _promise(self, sequence: Sequence, identity: PrefixBlock) -> None:
        """Let others wait for a block: `sequence` is about to compute it."""
        self._being_computed.add(identity.hash)
        sequence.looked_up_in_vain = identity.hash

    def _is_computed(self, sequence: Sequence) -> None:
        """End all waits for the block that `sequence` looked up without a match: it was published, or will not be."""
        self._being_computed.discard(sequence.looked_up_in_vain)
        sequence.looked_up_in_vain = b""

    def _attach(self, sequence: Sequence, block: int, identity: PrefixBlock) -> None:
        self._pool.share(block)
        sequence.block_ids.append(block)
        sequence.num_computed_tokens += identity.num_tokens
        sequence.kv_min_version = self.policy_version

    def _note(self, sequence: Sequence, index: int) -> None:
        """Have a known full block of a sequence saved outside of the pool."""
        if self.tier is not None:
            self.tier.note_block(sequence.block_ids[index], sequence.prefix[index], sequence.request)

    def _leave_picture(self, sequence: Sequence) -> None:
        """Give up the known blocks behind the start of a picture that they end in, if it must not be split."""
        whole = self._config.whole_pictures(sequence.request.source)
        start = start_between_pictures(whole, sequence.num_computed_tokens)
        if start == sequence.num_computed_tokens:
            return
        num_kept = -(-start // self.block_size)
        for block in reversed(sequence.block_ids[num_kept:]):
            self._release(block)
        del sequence.block_ids[num_kept:], sequence.prefix[start // self.block_size :]
        sequence.num_computed_tokens = start
        if not start:
            sequence.kv_min_version = None

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and self._pool.is_shared(sequence.block_ids[index])

    def _spares_full_block(self, sequence: Sequence, end: int) -> bool:
        """Whether `sequence` continues inside a known full block, as states let it, and a copy of that fits too."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if self.states is None or not offset or not self._cache.holds_full(sequence.block_ids[index], self.block_size):
            return False
        return self._num_missing(sequence, end) < self._pool.num_free

    def _identify(self, sequence: Sequence, index: int, end: int = sys.maxsize) -> PrefixBlock:
        """The identity of a block of `sequence`, of its tokens below `end` only."""
        start = index * self.block_size
        token_ids = sequence.token_ids[start : min(start + self.block_size, end)]
        if sequence.request.prompt_keys is not None:
            token_ids = sequence.request.put_keys(token_ids, start)
        return PrefixBlock(
            sequence.prefix[index - 1] if index else None,
            token_ids,
            self.policy_version,
            sequence.request.source.cache_salt,
            sequence.request.kv_space,
        )
