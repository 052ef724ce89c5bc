"""The pool of KV blocks, as numbers: references to each, and the order in which free ones are used."""

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference counts and one free list, every operation O(1).

    free list   |front: reused first                back: reused last|
                | content worthless | content cached, oldest first   |
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return len(self._free)

    def allocate(self) -> int:
        """Take the block at the front, with one reference. The caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        self._num_references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference; a free block (found through the prefix cache) leaves the free list."""
        if self._num_references[block] == 0:
            del self._free[block]
        self._num_references[block] += 1

    def release(self, block: int, *, worth_keeping: bool) -> None:
        """Drop a reference. With the last one the block goes to the back of the free list, or to its front."""
        assert self._num_references[block] > 0, f"block {block} released without a reference"
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            self._free[block] = None
            if not worth_keeping:
                self._free.move_to_end(block, last=False)

    def is_shared(self, block: int) -> bool:
        """Whether writing into `block` would change another sequence's context."""
        return self._num_references[block] > 1

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Recount references from all block tables."""
        counted = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._num_references):
            assert count == counted[block], f"block {block}: {count} references, {counted[block]} in tables"
            assert (block in self._free) == (count == 0), f"block {block}: {count} references, free list disagrees"
        assert len(self._free) <= self.num_blocks, "more free blocks than blocks"
