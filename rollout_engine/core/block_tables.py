"""Block tables of sequences: grow, share, copy on write, publish, release."""

import sys
from collections.abc import Iterable

from rollout_engine.core.block_pool import BlockPool
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.prefix_cache import PrefixBlock, PrefixCache
from rollout_engine.core.request import Sequence


class BlockTables:
    """Every change of a sequence's `block_ids` happens here, over one pool and one prefix cache."""

    def __init__(self, config: CoreConfig, policy_version: int) -> None:
        self.policy_version = policy_version
        """Policy version that computes KV now; only its blocks are published and found."""
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        """Whether blocks are published and found again."""
        self._pool = BlockPool(config.num_blocks)
        self._cache = PrefixCache()
        self._being_computed: set[bytes] = set()
        """Hashes of blocks that were looked up without a match, and that the searching sequence computes itself."""

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Blocks referenced by live requests / all blocks."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """Free blocks needed to compute `sequence` up to token `end`, its copy on write included."""
        return -(-end // self.block_size) - len(sequence.block_ids) + self._writes_shared_block(sequence)

    def extend(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """Give every position below `end` a block of its own to be written; returns (source, destination) copies."""
        copies = []
        if self._writes_shared_block(sequence):
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
        return copies

    def attach_prefix(self, sequence: Sequence) -> bool:
        """Start `sequence` on the known blocks of its prefix; at least one token is left to compute.

        Returns False, and does nothing, if a sequence with the same prefix computes the next of its blocks now.
        """
        if not self.caching:
            return True
        assert not sequence.block_ids, f"{sequence.sequence_id} already has blocks"
        end = sequence.num_tokens - 1
        while (len(sequence.prefix) + 1) * self.block_size <= end:
            wanted = self._identify(sequence, len(sequence.prefix))
            found = self._cache.find(wanted)
            if found is None:
                if wanted.hash in self._being_computed:
                    self.release(sequence)
                    return False
                self._being_computed.add(wanted.hash)
                sequence.looked_up_in_vain = wanted.hash
                break
            self._attach(sequence, *found)
            sequence.prefix.append(found[1])
        found = self._cache.find_tail(self._identify(sequence, len(sequence.prefix), end))
        if found is not None:
            self._attach(sequence, *found)
        return True

    def publish(self, sequence: Sequence, end: int) -> None:
        """Publish newly filled blocks below token `end`, unless the sequence has KV of an older version."""
        num_full = end // self.block_size
        if len(sequence.prefix) == num_full or not self.caching or sequence.kv_min_version != self.policy_version:
            return
        for index in range(len(sequence.prefix), num_full):
            identity = self._identify(sequence, index)
            self._cache.publish(sequence.block_ids[index], identity)
            known = self._cache.find(identity)
            sequence.prefix.append(known[1] if known else identity)
        self._is_computed(sequence)

    def publish_tail(self, sequence: Sequence) -> None:
        """Publish, for a next turn, the last block of a sequence whose last token was just sampled, and has no KV."""
        index, num_tokens = divmod(len(sequence.token_ids) - 1, self.block_size)
        is_known = len(sequence.prefix) == index and sequence.kv_min_version == self.policy_version
        if num_tokens and is_known and self.caching:
            identity = self._identify(sequence, index, len(sequence.token_ids) - 1)
            self._cache.publish_tail(sequence.block_ids[index], identity)

    def fork(self, leader: Sequence, child: Sequence) -> None:
        """Let `child` continue from everything that `leader` has computed, on the same blocks."""
        for block in leader.block_ids:
            self._pool.share(block)
        child.block_ids = leader.block_ids.copy()
        child.prefix = leader.prefix.copy()
        child.num_computed_tokens = leader.num_computed_tokens
        leader.num_writable_tokens = child.num_writable_tokens = leader.num_computed_tokens
        child.kv_min_version = leader.kv_min_version

    def release(self, sequence: Sequence) -> None:
        """Drop all references of a sequence, the tail first, so that the head of a prefix stays cached longest."""
        for block in reversed(sequence.block_ids):
            self._release(block)
        self._is_computed(sequence)
        sequence.block_ids = []
        sequence.prefix = []
        sequence.num_computed_tokens = sequence.num_writable_tokens = sequence.num_sent_blocks = 0
        sequence.kv_min_version = None

    def unpublish(self, sequence: Sequence) -> None:
        """Remove the blocks of a sequence from the prefix cache: their KV may be wrong."""
        for block in sequence.block_ids:
            self._cache.forget(block)

    def clear_cache(self) -> None:
        """Forget every known prefix."""
        self._cache.clear()
        self._pool.forget_contents()

    def start_version(self, version: int) -> None:
        """From now on KV is of this policy version; that of earlier ones is not found again."""
        self.policy_version = version
        self._pool.forget_contents()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount references and compare every table with the claims of its sequence."""
        sequences = list(sequences)
        assert self._being_computed == {s.looked_up_in_vain for s in sequences} - {b""}, "a block is computed by nobody"
        self._pool.check_integrity(sequence.block_ids for sequence in sequences)
        self._cache.check_integrity()
        for sequence in sequences:
            self._check_table(sequence)

    def _allocate(self) -> int:
        block = self._pool.allocate()
        self._cache.forget(block)
        return block

    def _release(self, block: int) -> None:
        worth_keeping = self._cache.holds(block, self.policy_version)
        self._pool.release(block, worth_keeping=worth_keeping)

    def _is_computed(self, sequence: Sequence) -> None:
        """End all waits for the block that `sequence` looked up without a match: it was published, or will not be."""
        self._being_computed.discard(sequence.looked_up_in_vain)
        sequence.looked_up_in_vain = b""

    def _attach(self, sequence: Sequence, block: int, identity: PrefixBlock) -> None:
        self._pool.share(block)
        sequence.block_ids.append(block)
        sequence.num_computed_tokens += identity.num_tokens
        sequence.kv_min_version = self.policy_version

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and self._pool.is_shared(sequence.block_ids[index])

    def _identify(self, sequence: Sequence, index: int, end: int = sys.maxsize) -> PrefixBlock:
        """The identity of a block of `sequence`, of its tokens below `end` only."""
        start = index * self.block_size
        return PrefixBlock(
            sequence.prefix[index - 1] if index else None,
            sequence.token_ids[start : min(start + self.block_size, end)],
            self.policy_version,
            sequence.request.source.cache_salt,
            sequence.request.kv_space,
        )

    def _check_table(self, sequence: Sequence) -> None:
        name = sequence.sequence_id
        num_computed, num_blocks = sequence.num_computed_tokens, len(sequence.block_ids)
        assert num_computed <= sequence.num_tokens, f"{name}: computed {num_computed} of {sequence.num_tokens} tokens"
        assert num_computed <= num_blocks * self.block_size, f"{name}: {num_computed} tokens in {num_blocks} blocks"
        assert (num_computed == 0) == (sequence.kv_min_version is None), f"{name}: KV without a version"
        assert len(sequence.prefix) <= num_computed // self.block_size, f"{name}: a partial block was published"
        assert sequence.num_sent_blocks <= num_blocks, f"{name}: the runner knows more blocks than there are"
        written = sequence.block_ids[num_computed // self.block_size : sequence.num_writable_tokens // self.block_size]
        assert not any(map(self._pool.is_shared, written)), f"{name}: a shared block would be written"
        for index, identity in enumerate(sequence.prefix):
            tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            assert identity.holds(tokens), f"{name}: block {index} was published with other tokens"
