"""The interface of a KV connector: a second, larger prefix cache outside the pool.

    core, runner                        connector
    open(layout), meet(peers)   ──>     start-up
    fetch(keys)                 ──>     a thread brings blocks near    wait(seconds) -> done
    load(key)                   ──>     memoryview of the block's bytes | None
    save(key, data)             ──>     a copy is kept, or dropped

Nothing but a hit or a miss ever results: bytes that are torn, foreign or late, and a store that is full or gone, are a
miss, a counter and at most one line of the log. A key states all that the bytes depend on (weights, adapter, tokens),
the layout how they lie; so nothing stale can match. `rollout_engine/kv/tiers.py` makes a connector by its name.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

KEY_BYTES = 32
"""Bytes of each key."""
_FORM = "rollout-engine kv layout 1"

Wait: TypeAlias = Callable[[float], bool]
"""Waits for a fetch, at most this number of seconds; returns whether it is done. Any thread may call it, repeatedly."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the bytes of blocks lie and were computed. Engines share blocks only if all fields are equal."""

    model: str
    """Model type and geometry: layers, heads, head sizes, positions, as text."""
    dtype: str
    """Dtype of the pool's tensors."""
    block_size: int
    """Tokens of a block."""
    block_bytes: int
    """Bytes of a block: of all layers and tensors of the pool."""
    state_bytes: int = 0
    """Bytes of a snapshot of the states of recurrent layers; 0: the model has none."""
    made_with: str = ""
    """Arithmetic that computed the bytes: device, kernels, settings that change bits."""
    pool: str = ""
    """Name of the order of layers, tensors and heads within a block."""

    @property
    def namespace(self) -> str:
        """Hexadecimal digest (32 characters) of all fields."""
        fields = msgspec.json.encode([_FORM, *msgspec.structs.astuple(self)])
        return hashlib.blake2b(fields, digest_size=16).hexdigest()


class KVConnectorStats(msgspec.Struct, kw_only=True):
    """Counters of a connector since it was made, and the blocks that it holds now. Snapshots of states count too."""

    num_blocks: int = 0
    """Blocks held now, as far as this process can count them without looking at the whole store."""
    num_bytes: int = 0
    """Bytes held now, headers included; of a shared store, those of all its users."""
    max_bytes: int = 0
    """Bound of `num_bytes`; 0: not known."""
    num_saved: int = 0
    """Blocks that this engine has stored."""
    num_saved_bytes: int = 0
    """Bytes of these blocks."""
    num_loaded: int = 0
    """Loads that returned a block."""
    num_loaded_bytes: int = 0
    """Bytes of these loads."""
    num_misses: int = 0
    """Loads that returned None."""
    num_refused: int = 0
    """Blocks found torn, damaged, foreign or behind a link; each was a miss."""
    num_dropped: int = 0
    """Saves given up: the queue or the store was full, or writing failed."""
    num_failures: int = 0
    """Calls of a user's connector that raised; each was a miss, or a save given up."""
    num_evicted: int = 0
    """Blocks that this engine removed because the store was over its bound."""
    save_seconds: float = 0.0
    """Time of callers in `save`."""
    load_seconds: float = 0.0
    """Time of callers in `load`."""
    fetch_seconds: float = 0.0
    """Time of the connector's own threads in fetches."""


class KVConnector(Protocol):
    """A tier of blocks. A class of yours is made by `Class(argument, max_bytes)`; see `make_connector`.

    `open` and `meet` may raise `ConfigError`. No other method raises: a fault is a miss, or a save that is dropped.
    Several threads may call them at the same time, `load` and `holds` inside a step: they should take microseconds for
    blocks that were fetched.
    """

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Connect, before any other method. Returns metadata for the engines of a fleet. Raises `ConfigError`."""
        ...

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Take the metadata of the other engines of a fleet."""
        ...

    def fetch(self, keys: Sequence[bytes]) -> Wait | None:
        """Begin to bring blocks near, in this order. None if there is nothing to wait for."""
        ...

    def load(self, key: bytes) -> memoryview | None:
        """Verified bytes of a block, read-only and valid while they are referenced; None if it cannot be had."""
        ...

    def save(self, key: bytes, data: memoryview) -> None:
        """Store a block's bytes; `data` (contiguous, uint8) may change as soon as this returns."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether the block is stored, or about to be; it may be gone by the time that it is loaded."""
        ...

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget blocks that are not needed any more."""
        ...

    def reset(self) -> None:
        """Forget all blocks of this engine's layout."""
        ...

    def stats(self) -> KVConnectorStats:
        """A copy of the counters."""
        ...

    def close(self) -> None:
        """End threads and release memory; a second call does nothing. Saves that were taken may still be written."""
        ...
