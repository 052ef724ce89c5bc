"""KV blocks that may be found again: by their tokens, all tokens before them, policy version, space and salt.

Full ones and tails: the last block of a sequence that has ended, filled in part, in which the next turn continues.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence


class PrefixBlock:
    """The identity of one KV block: its own tokens after its parent's, under one policy version, space and salt."""

    __slots__ = ("content", "hash", "noted_serial", "parent", "salt", "space", "tier_key", "version")

    def __init__(
        self, parent: "PrefixBlock | None", token_ids: Sequence[int], version: int, salt: str, space: int = 0
    ) -> None:
        """`space`: number of those that may share KV, by their adapter and by whether routing is kept."""
        self.parent = parent
        self.content = array("I", token_ids).tobytes()
        self.version = version
        self.salt, self.space = salt, space
        self.hash: bytes = block_hash(self.parent_hash, self.content, version, salt, space)
        self.tier_key: tuple[int, bytes] = (0, b"")
        """Its key outside of the pool, and the tier's serial number for which that holds (`core.tier`)."""
        self.noted_serial = 0
        """The serial number of the tier for which it was saved or loaded; 0: none."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the block: fewer than it has room for if it is a tail."""
        return len(self.content) // 4

    @property
    def parent_hash(self) -> bytes:
        """The hash of the block before it; b"" for the first."""
        return self.parent.hash if self.parent else b""

    def holds(self, token_ids: Sequence[int]) -> bool:
        """Whether these are the block's own tokens."""
        return self.content == array("I", token_ids).tobytes()

    def same_as(self, other: "PrefixBlock") -> bool:
        """Compare contents back to the root: a hash collision is a miss, never a wrong hit.

        Known blocks replace equal new ones in every chain, so this stops at the first or second parent.
        """
        one: PrefixBlock | None = self
        two: PrefixBlock | None = other
        while one is not two:
            if one is None or two is None:
                return False
            if (one.content, one.version, one.salt, one.space) != (two.content, two.version, two.salt, two.space):
                return False
            one, two = one.parent, two.parent
        return True


def block_hash(parent: bytes, content: bytes, version: int, salt: str, space: int = 0) -> bytes:
    """Hash a block with its prefix: blake2b-128 over fields of fixed or stated width and, last, the salt."""
    numbers = version.to_bytes(8, "big", signed=True) + len(content).to_bytes(4, "big")
    numbers += space.to_bytes(8, "big")
    salt_bytes = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(parent.rjust(16, b"\0") + numbers + content + salt_bytes, digest_size=16).digest()


class PrefixCache:
    """Two maps kept inverse to each other: hash -> block id, block id -> identity."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._identity: dict[int, PrefixBlock] = {}
        self._tail_lengths: dict[bytes, Counter[int]] = {}
        """Hash of the block before -> how many tails follow it, by their numbers of tokens."""

    def find(self, wanted: PrefixBlock) -> tuple[int, PrefixBlock] | None:
        """The block that holds `wanted`, and the identity already known for it."""
        block = self._block_by_hash.get(wanted.hash)
        if block is None or not self._identity[block].same_as(wanted):
            return None
        return block, self._identity[block]

    def find_tail(self, whole: PrefixBlock) -> tuple[int, PrefixBlock] | None:
        """The longest tail whose tokens are the first of `whole`, and its identity."""
        token_ids = array("I", whole.content)
        for num_tokens in sorted(self._tail_lengths.get(whole.parent_hash, ()), reverse=True):
            if num_tokens <= len(token_ids):
                tail = PrefixBlock(whole.parent, token_ids[:num_tokens], whole.version, whole.salt, whole.space)
                if (found := self.find(tail)) is not None:
                    return found
        return None

    def publish_tail(self, block: int, identity: PrefixBlock) -> None:
        """Make the tail `block` findable. Call `forget` before anything more is written into it."""
        if identity.hash not in self._block_by_hash:
            self.publish(block, identity)
            self._tail_lengths.setdefault(identity.parent_hash, Counter())[identity.num_tokens] += 1

    def publish(self, block: int, identity: PrefixBlock) -> None:
        """Make `block` findable. When the hash is taken (same content, or a collision) the first block stays."""
        if identity.hash not in self._block_by_hash:
            self._block_by_hash[identity.hash] = block
            self._identity[block] = identity

    def forget(self, block: int) -> None:
        """Remove a block that is about to be overwritten, or whose KV may be wrong."""
        identity = self._identity.pop(block, None)
        if identity is not None:
            del self._block_by_hash[identity.hash]
            self._forget_tail(identity)

    def holds(self, block: int, version: int) -> bool:
        """Whether `block` can still be found under `version`."""
        identity = self._identity.get(block)
        return identity is not None and identity.version == version

    def is_known(self, block: int) -> bool:
        """Whether `block` was published, under any version, and not forgotten since."""
        return block in self._identity

    def holds_full(self, block: int, block_size: int) -> bool:
        """Whether `block` is known with as many tokens as it has room for."""
        identity = self._identity.get(block)
        return identity is not None and identity.num_tokens == block_size

    @property
    def num_known(self) -> int:
        """Blocks of which that is so."""
        return len(self._identity)

    def clear(self) -> None:
        """Forget every block."""
        self._block_by_hash.clear()
        self._identity.clear()
        self._tail_lengths.clear()

    def check_integrity(self) -> None:
        """Assert that the two maps are inverse to each other."""
        assert len(self._block_by_hash) == len(self._identity), "hash and identity maps differ in size"
        for block, identity in self._identity.items():
            assert self._block_by_hash.get(identity.hash) == block, f"cached block {block} is not found by its own hash"
        num_blocks = Counter((each.parent_hash, each.num_tokens) for each in self._identity.values())
        for parent_hash, lengths in self._tail_lengths.items():
            for num_tokens, count in lengths.items():
                assert num_blocks[parent_hash, num_tokens] == count > 0, "tails were miscounted"

    def _forget_tail(self, identity: PrefixBlock) -> None:
        lengths = self._tail_lengths.get(identity.parent_hash)
        if lengths is not None and identity.num_tokens in lengths:
            lengths[identity.num_tokens] -= 1
            if not lengths[identity.num_tokens]:
                del lengths[identity.num_tokens]
            if not lengths:
                del self._tail_lengths[identity.parent_hash]
