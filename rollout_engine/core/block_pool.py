"""The pool of KV blocks, as numbers: references to each, and the order in which free ones are used."""

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference counts and free blocks. Every operation is O(1), but for `forget_contents`.

    reused first  | content worthless | never used | content cached, oldest first | kept longer |  reused last

    Memory of blocks that were never used need not exist yet, so it is taken only if content would be lost otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._num_used = 0
        """Blocks from this number on were never used."""
        self._worthless: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free blocks with cached content that is to be kept longer, oldest first."""
        self._marked: set[int] = set()
        """Blocks that are `_kept` while they are free."""

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return len(self._worthless) + self.num_blocks - self._num_used + len(self._cached) + len(self._kept)

    def allocate(self) -> int:
        """Take a free block, with one reference. The caller has checked `num_free`."""
        if self._worthless:
            block, _ = self._worthless.popitem()
        elif self._num_used < self.num_blocks:
            block = self._num_used
            self._num_used += 1
        else:
            block, _ = (self._cached or self._kept).popitem(last=False)
        self._marked.discard(block)
        self._num_references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference; a free block (found through the prefix cache) is free no more."""
        if self._num_references[block] == 0:
            del (self._kept if block in self._kept else self._cached)[block]
        self._num_references[block] += 1

    def keep_longer(self, block: int) -> None:
        """Reuse a block with a reference, once it is free and its content cached, after all that are not marked so."""
        self._marked.add(block)

    def release(self, block: int, *, worth_keeping: bool) -> None:
        """Drop a reference. With the last one the block is free; `worth_keeping`: its content is cached."""
        assert self._num_references[block] > 0, f"block {block} released without a reference"
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            cached = self._kept if block in self._marked else self._cached
            (cached if worth_keeping else self._worthless)[block] = None

    def forget_contents(self) -> None:
        """Mark the content of free blocks as worthless. O(n) for the smaller of the two kinds, then O(1)."""
        fewer, more = sorted((self._worthless, self._cached), key=len)
        more.update(fewer)
        more.update(self._kept)
        self._worthless, self._cached = more, OrderedDict()
        self._kept.clear()
        self._marked.clear()

    def is_shared(self, block: int) -> bool:
        """Whether writing into `block` would change another sequence's context."""
        return self._num_references[block] > 1

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Recount references from all block tables."""
        counted = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._num_references):
            assert count == counted[block], f"block {block}: {count} references, {counted[block]} in tables"
            num_places = (block in self._worthless) + (block in self._cached) + (block >= self._num_used)
            num_places += block in self._kept
            assert num_places == (count == 0), f"block {block}: {count} references, and free {num_places} times"
