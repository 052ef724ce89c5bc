"""Keys of KV blocks outside of the pool: 32 bytes that differ if anything differs that the KV depends on.

    root     digest of the live weights, digest of the adapter, cache salt, whether routing is kept
    block    key of the block before, or the root; the block's token ids; digests of the pictures in it
    state    key of the block that it stands behind

Engines with equal weights make equal keys, whatever policy versions they count. The model, dtype and layout are the
connector's namespace.
"""

import hashlib
from array import array
from collections.abc import Mapping

from rollout_engine.core.picture_keys import FIRST_KEY

KEY_BYTES = 32


def root_key(weights: str, adapter: str, salt: str, *, keeps_routing: bool) -> bytes:
    """The key that chains begin with. `weights`, `adapter`: digests of values; "" without an adapter."""
    texts = (weights, adapter, salt, "routing" if keeps_routing else "")
    return _hash(b"root", *(text.encode("utf-8", "surrogatepass") for text in texts))


def block_key(parent: bytes, content: bytes, pictures: Mapping[int, bytes]) -> bytes:
    """The key of a full block. `parent`: the key of the block before, or the root.

    `content`: its ids, uint32 each; in place of those of pictures this engine's own keys (`PictureKeys`).
    `pictures`: number of each picture in the prompt -> 16 bytes that identify it and the tokens of its span.
    """
    numbers = array("I", content)
    places = [index for index, number in enumerate(numbers) if number >= FIRST_KEY] if pictures else []
    if not places:
        return _hash(b"block", parent, content)
    identities = b"".join(pictures[numbers[index] >> 1] for index in places)
    for index in places:
        numbers[index] = FIRST_KEY + (numbers[index] & 1)
    return _hash(b"pictures", parent, numbers.tobytes(), identities)


def state_key(block: bytes) -> bytes:
    """The key of the states behind the block with this key."""
    return _hash(b"state", block)


def _hash(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
