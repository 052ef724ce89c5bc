"""Block tables with a tier outside of the pool, and hints of requests about the KV that they leave behind."""

from rollout_engine.base.messages import SchedulerOutput
from rollout_engine.base.pictures import start_between_pictures
from rollout_engine.core.block_tables import BlockTables
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.request_table import Preparation
from rollout_engine.core.tier import Rows


class TieredTables(BlockTables):
    """Satisfies `tier.Tables`. Without a tier these are the block tables alone."""

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix is known only up to a state."""
        return self.states is not None

    def next_blocks(self, sequence: Sequence, num_blocks: int) -> Rows:
        """The full blocks of a sequence behind its known ones, up to `num_blocks` of all."""
        num_known, rows = len(sequence.prefix), Rows()
        while len(sequence.prefix) < num_blocks:
            wanted = self._identify(sequence, len(sequence.prefix))
            rows.append(self._cache.find(wanted) or (-1, wanted))
            sequence.prefix.append(rows[-1][1])
        del sequence.prefix[num_known:]
        return rows

    def splits_picture(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether this number of blocks of a sequence ends inside a picture that must be computed as a whole."""
        end, whole = num_blocks * self.block_size, self._config.whole_pictures(sequence.request.source)
        return start_between_pictures(whole, end) != end

    def attach_found(self, sequence: Sequence, found: Rows) -> list[int]:
        """Append these to the known blocks, and -1 as a new one that others find; returns the numbers of new ones.

        There is room for them: the sequence was just admitted to run. A tail behind its known blocks is given up.
        """
        for block, _ in found:
            if block >= 0:
                self._pool.share(block)
        for block in reversed(sequence.block_ids[len(sequence.prefix) :]):
            self._release(block)
        del sequence.block_ids[len(sequence.prefix) :]
        new_blocks = []
        for block, identity in found:
            if block < 0:
                new_blocks.append(block := self._allocate())
                self._cache.publish(block, identity)
            sequence.block_ids.append(block)
            sequence.prefix.append(identity)
            if identity.hash == sequence.looked_up_in_vain:
                self._is_computed(sequence)
        sequence.num_computed_tokens = len(sequence.prefix) * self.block_size
        sequence.kv_min_version = self.policy_version
        if self.states is None and sequence.num_computed_tokens + self.block_size < sequence.num_tokens:
            following = self._identify(sequence, len(sequence.prefix))
            if following.hash not in self._being_computed and not sequence.looked_up_in_vain:
                self._promise(sequence, following)
        return new_blocks

    def attach_state(self, sequence: Sequence) -> int:
        """Give a sequence a slot for the state behind its known blocks; returns the slot, to be filled."""
        assert self.states is not None, "the model keeps states"
        return self.states.attach_new(sequence, sequence.prefix[-1])

    def prepare(self, request: Request, other: Preparation | None) -> Preparation | None:
        """Begin to fetch the prefix of a new request. Returns a wait for that and `other`; None if unneeded."""
        return other if self.tier is None else self.tier.prepare(self, request, other)

    def load_prefix(self, sequence: Sequence) -> None:
        """Extend the known prefix of a sequence that was just admitted by blocks from outside of the pool."""
        if self.tier is not None:
            self.tier.load_prefix(self, sequence)

    @property
    def has_loaded_enough(self) -> bool:
        """Whether the step that is being scheduled should admit no further sequence, for which it may have to load."""
        return self.tier is not None and self.tier.has_loaded_enough

    def complete(self, work: SchedulerOutput) -> None:
        """Give a step that was scheduled its loads, and all saves that were noted."""
        if self.tier is not None:
            self.tier.complete(work)

    def take_back(self, work: SchedulerOutput) -> None:
        """Note the saves of a step again that was not submitted."""
        if self.tier is not None:
            self.tier.take_back(work)

    def save_noted(self) -> None:
        """Save at once the KV that the next step would save. Call it while no step is in flight."""
        if self.tier is not None:
            self.tier.save_noted()

    def forget_outside(self, sequence: Sequence) -> None:
        """Remove the blocks of a sequence from the tier outside of the pool."""
        if self.tier is not None:
            self.tier.drop(list(zip(sequence.block_ids, sequence.prefix, strict=False)), sequence.request)

    def apply_hint(self, sequence: Sequence) -> None:
        """Carry out the hint of a sequence that ends and still has its blocks: "keep" or "drop"."""
        hint = sequence.request.source.params.kv_hint
        if hint == "drop":
            self.forget_own(sequence)
        elif hint == "keep":
            for block in sequence.block_ids:
                self._pool.keep_longer(block)

    def forget_own(self, sequence: Sequence) -> None:
        """Remove the blocks that a sequence alone has, and did not find known, here and outside of the pool."""
        first = (sequence.request.num_cached_tokens or 0) // self.block_size
        blocks = sequence.block_ids
        own = [index for index in range(first, len(blocks)) if not self._pool.is_shared(blocks[index])]
        for index in own:
            self._cache.forget(blocks[index])
        rows = [(blocks[index], sequence.prefix[index]) for index in own if index < len(sequence.prefix)]
        if self.states is not None:
            self.states.forget_behind([identity for _, identity in rows], sequence)
        if self.tier is not None:
            self.tier.drop(rows, sequence.request)

    def forget_contents(self) -> None:
        """Forget every known prefix after a failed step, and all noted saves: blocks may hold anything."""
        if self.tier is not None:
            self.tier.forget_noted()
        self.clear_cache()
